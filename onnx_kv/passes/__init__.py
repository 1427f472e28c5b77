"""The changes that can be made to a model's graph, one a file. `onnx_kv.patching` applies them to a model directory."""

from __future__ import annotations

from onnx_kv.graph import applied_passes
from onnx_kv.passes.base import GraphPass, PassOutcome, PassReport, Plan
from onnx_kv.passes.last_token_logits import LastTokenLogits
from onnx_kv.passes.lift_sequence_lengths import LiftSequenceLengths
from onnx_kv.passes.stamp_kv_layout import StampKvLayout

__all__ = [
    "GraphPass",
    "LastTokenLogits",
    "LiftSequenceLengths",
    "PassOutcome",
    "PassReport",
    "Plan",
    "StampKvLayout",
    "applied_passes",
]
