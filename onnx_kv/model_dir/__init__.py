"""A model directory as ONNX Runtime GenAI's exporters write it: open and check it, list its data, publish a new one."""

from __future__ import annotations

from onnx_kv.model_dir.source import ModelDir

__all__ = ["ModelDir"]
