"""Small constants of a graph: the indices and axes that patterns depend on, and what follows from constants alone."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

_MOST_BYTES = 64  # an index, a list of axes; never a weight


def integers(value: ir.Value | None) -> tuple[int, ...] | None:
    """The elements of a small integer constant, flat; None where `value` is anything else.

    Exporters put even an index of eight bytes into the external data file, from where it is read alone: `onnx_ir` would
    refuse a data file that is a link, as every one in a hub cache is. The location must have been checked before.
    """
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or tensor.nbytes > _MOST_BYTES:
        return None
    if not isinstance(tensor, ir.ExternalTensor):
        return tuple(int(item) for item in tensor.numpy().reshape(-1))
    with open(tensor.path, "rb") as file:
        data = os.pread(file.fileno(), tensor.nbytes, tensor.offset or 0)
    return tuple(int(item) for item in np.frombuffer(data, tensor.dtype.numpy().newbyteorder("<")))


def is_constant(value: ir.Value) -> bool:
    """Whether `value` depends on no input of the graph: a weight, or made of weights (dequantised, transposed)."""
    if value.is_graph_input():
        return False
    node = value.producer()
    if node is None:
        return value.is_initializer()
    return all(item is None or is_constant(item) for item in node.inputs)


def drop_unused(graph: ir.Graph, constants: Iterable[ir.Value | None]) -> None:
    """Remove those of the given constants of `graph` that nothing reads any more."""
    for value in constants:
        if value is None or value.uses() or value.is_graph_output() or value.name is None:
            continue
        node = value.producer()
        if node is not None and node.graph is graph:
            graph.remove(node, safe=True)
        elif value.is_initializer():
            graph.initializers.pop(value.name, None)
