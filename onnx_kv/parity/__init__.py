"""Proof that a layout changes nothing: the same prompts in one process a configuration, compared step by step."""

from __future__ import annotations

from onnx_kv.parity.check import check_parity
from onnx_kv.parity.report import ParityReport

__all__ = ["ParityReport", "check_parity"]
