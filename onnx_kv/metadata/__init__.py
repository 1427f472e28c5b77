"""What a decoder's ports are and how its cache lies in memory: `genai_config.json` → `inference_metadata.yaml`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onnx_kv.metadata.generate import generate_metadata
from onnx_kv.metadata.publish import write_metadata
from onnx_kv.metadata.schema import FILE_NAME, Attention, LayerPorts, Metadata

if TYPE_CHECKING:
    from onnx_kv.metadata.follow import follow_graph
    from onnx_kv.metadata.validate import Validation, validate_metadata
    from onnx_kv.metadata.yaml_edit import update_kv_layout
    from onnx_kv.metadata.yaml_file import load_metadata

__all__ = [
    "FILE_NAME",
    "Attention",
    "LayerPorts",
    "Metadata",
    "Validation",
    "follow_graph",
    "generate_metadata",
    "load_metadata",
    "update_kv_layout",
    "validate_metadata",
    "write_metadata",
]

# Loaded when first used: generating needs neither PyYAML nor, without a graph, onnx_ir.
_LAZY = {
    "Validation": "validate",
    "follow_graph": "follow",
    "load_metadata": "yaml_file",
    "update_kv_layout": "yaml_edit",
    "validate_metadata": "validate",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
