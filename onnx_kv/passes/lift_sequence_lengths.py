"""Replace the attention mask by the two numbers that attention wants of it, as inputs of the model.

Exporters compute GroupQueryAttention's lengths in the graph, in every step, over every slot of the mask:

    seqlens_k             = Cast(ReduceSum(mask, axis 1) - 1, int32)      or the cast before the subtraction
    total_sequence_length = Cast(Gather(Shape(mask), 1), int32)

After the pass the model has no attention mask but the inputs `seqlens_k`, int32 [batch]: tokens in a row's cache after
the call, less one; and `total_sequence_length`, int32 [1]: tokens in the longest row's cache after the call.

Refused: a mask (or a value on the way) that something else reads, named; lengths computed in another way; a model whose
nodes do not take their lengths from one mask. It cannot be undone on the patched model, where the mask's arithmetic is
gone: patch the original without it instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, Pattern

from onnx_kv.errors import PatchRefusedError
from onnx_kv.graph import SEQLENS_K, TOTAL_SEQUENCE_LENGTH, NodeCall, is_gqa, node_calls, reads
from onnx_kv.passes.base import GraphPass, Plan, count
from onnx_kv.passes.constants import drop_unused, integers

SEQLENS_K_INPUT = "seqlens_k"
TOTAL_SEQUENCE_LENGTH_INPUT = "total_sequence_length"

_INT32 = int(ir.DataType.INT32)


def _sum_subtract_cast(op: Any, mask: Any, axis: Any, one: Any) -> Any:
    total = op.ReduceSum(mask, axis, _allow_other_attributes=True)
    return op.Cast(op.Sub(total, one), to=_INT32)


def _sum_cast_subtract(op: Any, mask: Any, axis: Any, one: Any) -> Any:
    total = op.ReduceSum(mask, axis, _allow_other_attributes=True)
    return op.Sub(op.Cast(total, to=_INT32), one)


def _cast_sum_subtract(op: Any, mask: Any, axis: Any, one: Any) -> Any:
    total = op.ReduceSum(op.Cast(mask, to=_INT32), axis, _allow_other_attributes=True)
    return op.Sub(total, one)


def _slots_of_mask(op: Any, mask: Any, axis: Any) -> Any:
    return op.Cast(op.Gather(op.Shape(mask), axis, _allow_other_attributes=True), to=_INT32)


_SEQLENS_K_PATTERNS = [Pattern(form) for form in (_sum_subtract_cast, _sum_cast_subtract, _cast_sum_subtract)]
_TOTAL_PATTERNS = [Pattern(_slots_of_mask)]


class LiftSequenceLengths(GraphPass):
    """Make the sequence lengths inputs of the model, in the attention mask's place."""

    name = "lift_sequence_lengths"

    def __init__(self, *, undo: bool = False) -> None:
        """Prepare to lift; `undo` is refused for a lifted model."""
        self.undo = undo

    def plan(self, model: ir.Model) -> Plan:
        """Find the mask's arithmetic.

        Raises:
            PatchRefusedError: see the module's text.
        """
        calls = list(node_calls(model))
        attention = [call for call in calls if is_gqa(call.node)]
        lengths = _distinct(call.input(SEQLENS_K) for call in attention)
        totals = _distinct(call.input(TOTAL_SEQUENCE_LENGTH) for call in attention)
        lifted = bool(lengths) and all(value.is_graph_input() for value in (*lengths, *totals))
        if lifted and self.undo:
            raise PatchRefusedError(
                self.name, ["it cannot be undone, the mask's arithmetic is gone; patch the original instead"]
            )
        if lifted or self.undo:
            state = "inputs of the model" if lifted else "not lifted"
            return Plan((), (f"the sequence lengths are {state}",), lambda: None)
        matches = [_match(model, value, _SEQLENS_K_PATTERNS) for value in lengths]
        matches += [_match(model, value, _TOTAL_PATTERNS) for value in totals]
        masks = {match.bindings["mask"] for match in matches if match}
        if not all(matches) or len(masks) != 1 or not next(iter(masks)).is_graph_input():
            raise PatchRefusedError(self.name, _other_arithmetic(attention))
        mask = masks.pop()
        chain = list(dict.fromkeys(node for match in matches if match for node in match.nodes))
        problems = [*_other_readers(model, calls, mask, chain), *_taken_names(model)]
        if problems:
            raise PatchRefusedError(self.name, problems)
        change = f"input {mask.name!r} replaced by {SEQLENS_K_INPUT!r} and {TOTAL_SEQUENCE_LENGTH_INPUT!r}"
        apply = partial(_apply, model.graph, mask, chain, lengths, totals)
        return Plan((f"{change}; {count(len(chain), 'node')} removed",), (), apply)


def _distinct(values: Iterator[ir.Value | None]) -> list[ir.Value]:
    return list(dict.fromkeys(value for value in values if value is not None))


def _match(model: ir.Model, value: ir.Value, patterns: Sequence[Pattern]) -> MatchResult | None:
    """The first pattern that computes `value` in the main graph, with the constants that it needs."""
    node = value.producer()
    if node is None or node.graph is not model.graph:
        return None
    for pattern in patterns:
        match = pattern.match(model, model.graph, node, check_nodes_are_removable=False)
        if match and _has_right_constants(match):
            return match
    return None


def _has_right_constants(match: MatchResult) -> bool:
    one = match.bindings.get("one")
    axis = integers(match.bindings["axis"])
    gathered_axis = next((node.attributes.get_int("axis", 0) for node in match.nodes if node.op_type == "Gather"), 0)
    return axis in ((1,), (-1,)) and gathered_axis == 0 and (one is None or integers(one) == (1,))


def _other_arithmetic(attention: Sequence[NodeCall]) -> Iterator[str]:
    yield "its lengths are not computed from one attention mask in a known way"
    for call in attention[:1]:
        for slot, name in ((SEQLENS_K, "seqlens_k"), (TOTAL_SEQUENCE_LENGTH, "total_sequence_length")):
            value = call.input(slot)
            producer = None if value is None else value.producer()
            source = "nothing" if value is None else f"{producer.op_type} {producer.name!r}" if producer else "an input"
            yield f"node {call.name!r} has its {name} from {source}"


def _other_readers(
    model: ir.Model, calls: Sequence[NodeCall], mask: ir.Value, chain: Sequence[ir.Node]
) -> Iterator[str]:
    """Yield what else reads the mask or a value on the way from it."""
    on_the_way = {mask, *(value for node in chain for value in node.outputs)}
    for call in calls:
        for slot, value in reads(model, call):
            as_length = is_gqa(call.node) and slot in (SEQLENS_K, TOTAL_SEQUENCE_LENGTH)
            if value in on_the_way and call.node not in chain and not as_length:
                origin = "" if value is mask else f", which comes of {mask.name!r}"
                yield f"node {call.name!r} ({call.node.op_type}) reads {value.name!r}{origin}"
    for value in model.graph.outputs:
        if value in on_the_way:
            yield f"{value.name!r}, which comes of {mask.name!r}, is an output of the model"


def _taken_names(model: ir.Model) -> Iterator[str]:
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [value for node in model.graph for value in node.outputs]
    for value in values:
        if value.name in (SEQLENS_K_INPUT, TOTAL_SEQUENCE_LENGTH_INPUT):
            yield f"it already has a value called {value.name!r}"


def _apply(
    graph: ir.Graph,
    mask: ir.Value,
    chain: Sequence[ir.Node],
    lengths: Sequence[ir.Value],
    totals: Sequence[ir.Value],
) -> None:
    batch = mask.shape[0] if mask.shape is not None else None
    int32 = ir.TensorType(ir.DataType.INT32)
    seqlens_k = ir.Value(name=SEQLENS_K_INPUT, type=int32, shape=ir.Shape([batch]))
    total = ir.Value(name=TOTAL_SEQUENCE_LENGTH_INPUT, type=int32, shape=ir.Shape([1]))
    for value in lengths:
        ir.convenience.replace_all_uses_with(value, seqlens_k)
    for value in totals:
        ir.convenience.replace_all_uses_with(value, total)
    constants = {value for node in chain for value in node.inputs if value is not None} - {mask}
    graph.remove(chain, safe=True)
    place = graph.inputs.index(mask)
    graph.inputs[place : place + 1] = [seqlens_k, total]
    drop_unused(graph, constants)
