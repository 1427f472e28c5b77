"""The graph beside a config: its ports, and what the attention nodes behind them say about them.

The wiring is read from the graph's structure: a port holds a sequence length because a GroupQueryAttention node reads
it in that slot, never because of its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from onnx_kv.errors import MetadataError, ModelDirError
from onnx_kv.graph import (
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    CacheLayer,
    attention_layers,
    has_cache,
    is_gqa,
    node_calls,
)
from onnx_kv.layout import KV_LAYOUT_ATTRIBUTE, KvLayout
from onnx_kv.metadata.json_file import refuse_stand_in

_PROTOBUF_LIMIT = 2**31 - 1  # bytes of one message


@dataclass(frozen=True)
class Port:
    """An input or output of the graph.

    `dtype` is ONNX's name in lower case (`float16`, `int64`; `sequence` for a port that is no tensor), `shape` has one
    entry an axis: a number, a name, or None; each is None where the graph does not say. `fed` is whether an input has
    to be given for the graph to run: something reads it and it has no default.
    """

    name: str
    dtype: str | None
    shape: tuple[int | str | None, ...] | None
    fed: bool

    def axis(self, index: int) -> int | None:
        """The size of an axis of a port with four, None where it is not a number."""
        size = self.shape[index] if self.shape is not None and len(self.shape) == 4 else None
        return size if isinstance(size, int) else None

    def __str__(self) -> str:
        shape = "?" if self.shape is None else ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name!r} ({self.dtype or 'untyped'} [{shape}])"


@dataclass(frozen=True)
class GraphPorts:
    """A decoder's graph as metadata sees it.

    `layers` are the attention layers found; `wiring_unknown` says why not where they cannot be told (`layers` is then
    empty). `seqlens_k` and `total_sequence_length` are the input ports that attention nodes read as such.
    """

    file: Path
    inputs: dict[str, Port]
    outputs: dict[str, Port]
    layers: tuple[CacheLayer, ...]
    wiring_unknown: str | None
    layout: KvLayout
    seqlens_k: str | None
    total_sequence_length: str | None


def read_ports(file: Path) -> GraphPorts:
    """Read the graph of an ONNX file; its weights are not read.

    Raises:
        MetadataError: not an ONNX model, or as `model_ports`.
    """
    refuse_stand_in(file)
    size = file.stat().st_size
    if size > _PROTOBUF_LIMIT:
        raise MetadataError(f"{file} has {size:,} bytes, more than an ONNX file can have: {_PROTOBUF_LIMIT:,}")
    try:
        proto = onnx.load(file, format="protobuf", load_external_data=False)
        model = ir.from_proto(proto)
    except Exception as error:  # protobuf and onnx_ir each raise many kinds for a damaged file
        raise MetadataError(f"{file} is not an ONNX model: {_first_line(error)}") from error
    if not proto.ir_version:
        raise MetadataError(f"{file} is not an ONNX model: it has no IR version")
    return model_ports(model, file)


def _first_line(error: BaseException) -> str:
    """What went wrong first; onnx_ir wraps the reason in one error for each part of the file that it was reading."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("\n")[0]


def model_ports(model: ir.Model, file: Path) -> GraphPorts:
    """Describe the ports of a graph; `file` is named in errors.

    Raises:
        MetadataError: two ports of one name on a side, nodes of several KV layouts, a malformed attention node.
    """
    layers: tuple[CacheLayer, ...] = ()
    wiring_unknown = None
    try:
        layout = _layout(file, model)
    except ModelDirError as error:
        raise MetadataError(f"{file}: {error}") from error
    try:
        layers = attention_layers(model)
    except ModelDirError as error:
        wiring_unknown = str(error)
    return GraphPorts(
        file=file,
        inputs=_ports(file, model.graph, model.graph.inputs),
        outputs=_ports(file, model.graph, model.graph.outputs),
        layers=layers,
        wiring_unknown=wiring_unknown,
        layout=layout,
        seqlens_k=_input_of_slot(model, SEQLENS_K),
        total_sequence_length=_input_of_slot(model, TOTAL_SEQUENCE_LENGTH),
    )


def _ports(file: Path, graph: ir.Graph, values: Iterable[ir.Value]) -> dict[str, Port]:
    ports = [_port(graph, value) for value in values]
    twice = [name for name, count in Counter(port.name for port in ports).items() if count > 1]
    if twice:
        raise MetadataError(f"{file}: the graph has several ports named {', '.join(map(repr, twice))}")
    return {port.name: port for port in ports}


def _port(graph: ir.Graph, value: ir.Value) -> Port:
    shape = None
    if value.shape is not None:
        shape = tuple(size if isinstance(size, int) else size.value for size in value.shape)
    # A graph without nodes only declares its ports; there, nothing says that one of them is not read.
    read = bool(value.uses()) or value.is_graph_output() or not len(graph)
    return Port(
        name=value.name or "",
        dtype=_dtype(value),
        shape=shape,
        fed=read and not value.is_initializer(),
    )


def _dtype(value: ir.Value) -> str | None:
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        return type(value.type).__name__.removesuffix("Type").lower()
    return None if value.dtype is None else value.dtype.name.lower()


def _layout(file: Path, model: ir.Model) -> KvLayout:
    """The layout on every attention node; read apart from `attention_layers`, which needs the caches to be in order."""
    layouts: dict[int, str] = {}
    for call in node_calls(model):
        if is_gqa(call.node) and has_cache(call):
            layouts.setdefault(call.integer(KV_LAYOUT_ATTRIBUTE, KvLayout.HEAD_MAJOR), call.name)
    numbers = {int(layout) for layout in KvLayout}
    if len(layouts) > 1 or not numbers.issuperset(layouts):
        found = ", ".join(f"{number} on node {name!r}" for number, name in layouts.items())
        raise MetadataError(f"{file}: the nodes do not have one KV layout; {KV_LAYOUT_ATTRIBUTE} is {found}")
    return KvLayout(next(iter(layouts), KvLayout.HEAD_MAJOR))


def _input_of_slot(model: ir.Model, slot: int) -> str | None:
    """The one graph input that attention nodes read directly at `slot`, None where none or several are read."""
    read = {call.input(slot) for call in node_calls(model) if is_gqa(call.node)}
    names = [value.name for value in model.graph.inputs if value in read]
    return names[0] if len(names) == 1 else None
