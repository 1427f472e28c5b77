"""Compute the logits of the last position only: nobody reads the others, and a row of them is a whole vocabulary.

A `Gather` of index -1 on the sequence axis is put before the LM head's matrix product:

    hidden [batch, sequence, width] → Gather(axis 1, [-1]) → [batch, 1, width] → head → logits [batch, 1, vocabulary]

The LM head is found from the logits backwards through what treats every position alike (bias, scale, mask, softcap,
cast). The last position is the last *column*: in a batch of prompts padded on the right it is not the last token of the
shorter rows, so that such prompts must be run row by row. `onnx_kv`'s own runtime prefills row by row.

Nothing to do where the exporter has done it (`prune_lm_head`). Refused, by node: logits that something else reads on
the way from the head; a head of another form. `LastTokenLogits(undo=True)` takes the Gather out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from onnx_kv.errors import PatchRefusedError
from onnx_kv.passes.base import GraphPass, Plan
from onnx_kv.passes.constants import drop_unused, integers, is_constant

_GATHER = "/onnx_kv/last_token/Gather"
_INDEX = "/onnx_kv/last_token/index"

_HEADS = {("", "MatMul"), *(("com.microsoft", name) for name in ("MatMulNBits", "MatMulBnb4", "FusedMatMul"))}
_EVERY_POSITION_ALIKE = {"Add", "Sub", "Mul", "Div", "Tanh", "Where", "Clip", "Cast", "Identity"}


@dataclass(frozen=True)
class _Head:
    """The LM head: its matrix product, the hidden states that it reads, and the values from there to the logits."""

    product: ir.Node
    hidden: ir.Value
    outputs: tuple[ir.Value, ...]


class LastTokenLogits(GraphPass):
    """Let only the last position's hidden state reach the LM head, or with `undo` all of them again."""

    name = "last_token_logits"

    def __init__(self, logits: str, *, undo: bool = False) -> None:
        """Name the model's output that holds the logits."""
        self.logits = logits
        self.undo = undo

    @property
    def leaves_mark(self) -> bool:
        """False when undone."""
        return not self.undo

    def plan(self, model: ir.Model) -> Plan:
        """Find the LM head.

        Raises:
            PatchRefusedError: see the module's text.
        """
        head, problems = _find_head(model.graph, self.logits)
        if head is None:
            raise PatchRefusedError(self.name, problems)
        gather = head.hidden.producer()
        ours = gather is not None and gather.name == _GATHER
        if self.undo:
            return self._plan_undo(model.graph, head, gather if ours else None)
        if ours or _is_pruned(head):
            return Plan((), ("the LM head reads the last position only",), lambda: None)
        if problems:
            raise PatchRefusedError(self.name, problems)
        note = f"{self.logits!r} is [batch, 1, vocabulary] for every prompt"
        change = f"only the last position reaches {head.product.op_type} {head.product.name!r}"
        return Plan((change,), (note,), partial(_apply, model.graph, head))

    def _plan_undo(self, graph: ir.Graph, head: _Head, gather: ir.Node | None) -> Plan:
        if gather is not None:
            change = f"all positions reach {head.product.op_type} {head.product.name!r} again"
            return Plan((change,), (), partial(_undo, graph, head, gather))
        if _is_pruned(head):
            raise PatchRefusedError(
                self.name, ["the exporter itself kept only the last position; export the model again"]
            )
        return Plan((), ("the LM head reads all positions",), lambda: None)


def _find_head(graph: ir.Graph, logits: str) -> tuple[_Head | None, list[str]]:
    """Return the LM head, None where its form is another, and why its rows cannot be dropped, if so."""
    value = next((output for output in graph.outputs if output.name == logits), None)
    if value is None:
        return None, [f"it has no output {logits!r}"]
    if value.shape is None or value.shape.rank() != 3:
        return None, [f"output {logits!r} is not declared as [batch, sequence, vocabulary]"]
    outputs = [value]
    while (node := value.producer()) is not None:
        data = [item for item in node.inputs if item is not None and not is_constant(item)]
        if len(data) != 1 or not _treats_positions_alike(node):
            break
        if (node.domain, node.op_type) in _HEADS:
            if data[0] is not node.inputs[0] or (data[0].shape is not None and data[0].shape.rank() != 3):
                break
            return _Head(node, data[0], tuple(reversed(outputs))), list(_other_readers(outputs))
        value = data[0]
        outputs.append(value)
    maker = f"{node.op_type} {node.name!r}" if node is not None else "an input"
    return None, [f"{value.name!r}, from which the logits are made, comes from {maker}, which is no known LM head"]


def _treats_positions_alike(node: ir.Node) -> bool:
    if (node.domain, node.op_type) in _HEADS:
        return True
    constants = [item for item in node.inputs if item is not None and is_constant(item)]
    along = [item for item in constants if item.shape is None or (item.shape.rank() > 1 and item.shape[-2] != 1)]
    return node.domain == "" and node.op_type in _EVERY_POSITION_ALIKE and not along


def _other_readers(outputs: Sequence[ir.Value]) -> Iterator[str]:
    """Yield what else reads the values from the logits (first) back to the head."""
    on_the_way = {value.producer() for value in outputs}
    for value in outputs:
        for node in value.consumers():
            if node not in on_the_way:
                yield f"node {node.name!r} ({node.op_type}) reads {value.name!r}, the logits of all positions"
        if value is not outputs[0] and value.is_graph_output():
            yield f"{value.name!r}, the logits of all positions, is an output of the model"


def _is_pruned(head: _Head) -> bool:
    """Whether the exporter has done it: one position is declared, or picked right before the head."""
    for value in (head.hidden, head.outputs[-1]):
        if value.shape is not None and value.shape.rank() == 3 and value.shape[1] == 1:
            return True
    node = head.hidden.producer()
    if node is not None and node.op_type in ("Unsqueeze", "Reshape") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return (
        node is not None
        and node.op_type == "Gather"
        and node.attributes.get_int("axis", 0) == 1
        and integers(node.inputs[1]) == (-1,)
    )


def _apply(graph: ir.Graph, head: _Head) -> None:
    index = ir.Value(name=_INDEX, const_value=ir.tensor([-1], dtype=ir.DataType.INT64, name=_INDEX))
    graph.register_initializer(index)
    gather = ir.node("Gather", [head.hidden, index], {"axis": 1}, name=_GATHER)
    last = gather.outputs[0]
    last.name, last.type, last.shape = f"{_GATHER}/output_0", head.hidden.type, head.hidden.shape
    graph.insert_before(head.product, gather)
    head.product.replace_input_with(0, last)
    _declare_positions((last, *head.outputs), 1)


def _undo(graph: ir.Graph, head: _Head, gather: ir.Node) -> None:
    hidden, index = gather.inputs
    head.product.replace_input_with(0, hidden)
    graph.remove(gather, safe=True)
    drop_unused(graph, [index])
    shape = None if hidden is None else hidden.shape
    _declare_positions(head.outputs, ir.SymbolicDim(None) if shape is None else shape[1])


def _declare_positions(values: Sequence[ir.Value], positions: int | ir.SymbolicDim) -> None:
    for value in values:
        if value.shape is not None and value.shape.rank() == 3:
            value.shape = ir.Shape([value.shape[0], positions, value.shape[2]])
