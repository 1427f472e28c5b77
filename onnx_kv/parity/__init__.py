"""Proof that a layout changes nothing: the same prompts in one process a configuration, compared step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx_kv.parity.check import check_parity
    from onnx_kv.parity.report import ParityReport

__all__ = ["ParityReport", "check_parity"]


def __getattr__(name: str) -> Any:
    # Loaded when first used: a configuration's process needs neither, nor what they import to patch models.
    if name == "check_parity":
        from onnx_kv.parity.check import check_parity

        return check_parity
    if name == "ParityReport":
        from onnx_kv.parity.report import ParityReport

        return ParityReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
