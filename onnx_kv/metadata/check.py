"""Metadata against the graph. The graph wins: every difference is a disagreement of the metadata with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx_kv.metadata.schema import Metadata

if TYPE_CHECKING:
    from onnx_kv.graph import CacheLayer
    from onnx_kv.metadata.ports import GraphPorts

_INTEGERS = frozenset({"int32", "int64"})
_FLOATS = frozenset({"float", "float16", "bfloat16", "double"})
_CACHES = _FLOATS | {"int8", "uint8", "int4", "uint4", "float8e4m3fn", "float8e5m2"}

# Element types and numbers of axes that a field's port may have.
_KINDS = {
    "io.token_input": (_INTEGERS, {2}),
    "io.attention_mask_input": (_INTEGERS | {"bool"}, {2}),
    "io.position_ids_input": (_INTEGERS, {2}),
    "io.seqlens_k_input": (frozenset({"int32"}), {1, 2}),
    "io.total_sequence_length_input": (frozenset({"int32"}), {0, 1}),
    "io.logits_output": (_FLOATS, {2, 3}),
}


@dataclass(frozen=True)
class Disagreement:
    """A place in the metadata that is wrong: `field` as in `io.kv_inputs[3]`, and what the graph says instead."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def disagreements(metadata: Metadata, graph: GraphPorts) -> list[Disagreement]:
    """Everything in which the metadata differs from the graph."""
    return [
        *repeated_ports(metadata),
        *_missing_ports(metadata, graph),
        *_kinds(metadata, graph),
        *_geometry(metadata, graph),
        *_wiring(metadata, graph),
        *_undescribed(metadata, graph),
        *_layout(metadata, graph),
        *_attention(metadata, graph),
    ]


def repeated_ports(metadata: Metadata) -> list[Disagreement]:
    """Fields that name a port which another field of the same side names as well."""
    found = []
    for ports in (metadata.inputs, metadata.outputs):
        counts = Counter(ports.values())
        found += [
            Disagreement(field, f"port {port!r} is named by {counts[port]} fields")
            for field, port in ports.items()
            if counts[port] > 1
        ]
    return found


def unchecked(metadata: Metadata, graph: GraphPorts) -> list[str]:
    """What of the graph the metadata leaves out although nothing is wrong, and what could not be compared."""
    inputs = [str(port) for name, port in graph.inputs.items() if not port.fed and name not in metadata.inputs.values()]
    outputs = [str(port) for name, port in graph.outputs.items() if name not in metadata.outputs.values()]
    notes = [f"graph input {port} is not described; the graph runs without it" for port in inputs]
    notes += [f"graph output {port} is not described" for port in outputs]
    if graph.wiring_unknown:
        notes.append(f"which ports belong together was not checked: {graph.wiring_unknown}")
    return notes


def _missing_ports(metadata: Metadata, graph: GraphPorts) -> Iterator[Disagreement]:
    for kind, named, ports, others in (
        ("input", metadata.inputs, graph.inputs, graph.outputs),
        ("output", metadata.outputs, graph.outputs, graph.inputs),
    ):
        for field, port in named.items():
            if port not in ports:
                wrong_side = " (it has a port of this name on the other side)" if port in others else ""
                yield Disagreement(field, f"the graph has no {kind} {port!r}{wrong_side}")


def _kinds(metadata: Metadata, graph: GraphPorts) -> Iterator[Disagreement]:
    for fields, ports in ((metadata.inputs, graph.inputs), (metadata.outputs, graph.outputs)):
        for field, name in fields.items():
            if name not in ports:
                continue
            port = ports[name]
            dtypes, ranks = _KINDS.get(field, (_CACHES, {4}))
            if port.dtype is not None and port.dtype not in dtypes:
                yield Disagreement(field, f"graph port {port} is not of type {' or '.join(sorted(dtypes))}")
            if port.shape is not None and len(port.shape) not in ranks:
                wanted = " or ".join(map(str, sorted(ranks)))
                yield Disagreement(field, f"graph port {port} has {len(port.shape)} axes, not {wanted}")


def _geometry(metadata: Metadata, graph: GraphPorts) -> Iterator[Disagreement]:
    """A layer's four ports have one element type and, where the graph says them, one head count and head size."""
    for index, layer in enumerate(metadata.layers):
        past = [graph.inputs.get(layer.past_key), graph.inputs.get(layer.past_value)]
        present = [graph.outputs.get(layer.present_key), graph.outputs.get(layer.present_value)]
        ports = [port for port in past + present if port is not None]
        for what, values in (
            ("element types", [port.dtype for port in ports]),
            ("head counts", [port.axis(1) for port in ports]),
            ("head sizes", [port.axis(3) for port in ports]),
        ):
            if len({value for value in values if value is not None}) > 1:
                found = ", ".join(map(str, ports))
                yield Disagreement(f"io.kv_inputs[{2 * index}]", f"the layer's ports have several {what}: {found}")


def _wiring(metadata: Metadata, graph: GraphPorts) -> Iterator[Disagreement]:
    """Each attention node's cache is one layer of the metadata, key as key and past with its present."""
    listed = {layer.past_key: (index, layer) for index, layer in enumerate(metadata.layers)}
    for node in graph.layers:
        key, name = repr(node.past_key), repr(node.node)
        if node.past_key not in listed:
            yield Disagreement("io.kv_inputs", f"the key cache {key} of node {name} is not listed as a layer's key")
            continue
        index, layer = listed[node.past_key]
        for field, wanted, named in (
            (f"io.kv_inputs[{2 * index + 1}]", node.past_value, layer.past_value),
            (f"io.kv_outputs[{2 * index}]", node.present_key, layer.present_key),
            (f"io.kv_outputs[{2 * index + 1}]", node.present_value, layer.present_value),
        ):
            if wanted != named:
                yield Disagreement(field, f"{named!r} is paired with {key}, but node {name} pairs it with {wanted!r}")


def _undescribed(metadata: Metadata, graph: GraphPorts) -> Iterator[Disagreement]:
    """Inputs that have to be fed and are no field's."""
    named = set(metadata.inputs.values())
    for name, port in graph.inputs.items():
        if port.fed and name not in named:
            yield Disagreement(
                "io",
                f"the graph reads an input {port} that nothing describes; recurrent state, convolution state and other "
                "inputs have no schema yet",
            )


def _layout(metadata: Metadata, graph: GraphPorts) -> Iterator[Disagreement]:
    if metadata.kv_layout is not graph.layout:
        yield Disagreement(
            "io.kv_layout", f"{metadata.kv_layout.yaml_name}, but the graph's nodes are {graph.layout.yaml_name}"
        )


def _attention(metadata: Metadata, graph: GraphPorts) -> Iterator[Disagreement]:
    block = metadata.attention
    if block is None:
        return
    for index, node in enumerate(layer_nodes(metadata, graph)):
        if node is None:
            continue
        for key, stated, actual in (
            ("num_attention_heads", block.query_heads[index], node.query_heads),
            ("num_key_value_heads", block.kv_heads[index], node.shape.kv_heads),
            ("head_size", block.head_sizes[index], node.shape.head_dim),
            ("sliding_window", block.windows[index], node.window),
        ):
            if stated != actual:
                says = f"{stated or 'none'} for layer {index}, but node {node.node!r} has {actual or 'none'}"
                yield Disagreement(f"attention.{key}", says)


def layer_nodes(metadata: Metadata, graph: GraphPorts) -> list[CacheLayer | None]:
    """The attention node of each cached layer, None where it is not known."""
    nodes = {node.past_key: node for node in graph.layers}
    return [nodes.get(layer.past_key) for layer in metadata.layers]
