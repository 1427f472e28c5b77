#!/usr/bin/env python3
"""`onnx-kv patch` from a checkout, without installing the package (click, onnx, onnx_ir, onnxscript, rich are needed).

python scripts/patch_kv_layout.py MODEL_DIR -o OUT --layout seq-major
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnx_kv.cli import main

if __name__ == "__main__":
    main(["patch", *sys.argv[1:]])
