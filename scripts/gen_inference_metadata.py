#!/usr/bin/env python3
"""Generate inference_metadata.yaml from a model's genai_config.json; runs from a checkout without installing.

python scripts/gen_inference_metadata.py MODEL_DIR [--output PATH] [--stdout] [--force] [--full]

Needs Python 3.11. With the package onnx_ir the graph beside the config is read and checked; without it, it is only
searched for the ports' names.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from onnx_kv.errors import OnnxKvError
from onnx_kv.metadata import generate_metadata, write_metadata


def main() -> int:
    """Run the command line; returns the exit code, 2 where the model is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--output", type=Path, metavar="PATH", help="default: MODEL_DIR/inference_metadata.yaml")
    target.add_argument("--stdout", action="store_true", help="print the text and write nothing")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--full", action="store_true", help="add the attention block")
    arguments = parser.parse_args()
    try:
        if arguments.stdout:
            metadata = generate_metadata(arguments.model_dir, full=arguments.full)
            sys.stdout.write(metadata.to_yaml())
        else:
            path, metadata = write_metadata(
                arguments.model_dir, arguments.output, force=arguments.force, full=arguments.full
            )
            print(f"wrote {path}: {len(metadata.layers)} cached layers, {metadata.max_sequence_length:,} tokens")
    except OnnxKvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for warning in metadata.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
