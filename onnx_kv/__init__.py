"""onnx_kv: patch, describe, run and compare KV-cache layouts of exported LLMs in ONNX Runtime."""

from __future__ import annotations

import importlib
from typing import Any

# Loaded when first used: patching needs no ONNX Runtime, and metadata needs no numpy.
_EXPORTS = {
    "patch_model": "onnx_kv.patching",
    "generate_metadata": "onnx_kv.metadata",
    "check_parity": "onnx_kv.parity",
    "Decoder": "onnx_kv.runtime.decoder",
    "KvLayout": "onnx_kv.layout",
    "OnnxKvError": "onnx_kv.errors",
}

__all__ = list(_EXPORTS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'onnx_kv' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
