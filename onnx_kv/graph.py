"""What a model's graph says about its attention: every GroupQueryAttention node and the cache it reads and writes.

Nodes are found wherever ONNX lets them be: in the main graph, in the bodies of If, Loop and Scan, and in model-local
functions, there once for each call. A cache is known by the *ports* (inputs and outputs of the main graph) that a
node's past and present lead to; names of ports are data and are never taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnx_kv.errors import ModelDirError
from onnx_kv.layout import KV_LAYOUT_ATTRIBUTE, TOKEN_OFFSET_ATTRIBUTE, TOKEN_STRIDE_ATTRIBUTE, KvLayout, LayerShape

GQA_DOMAIN = "com.microsoft"
GQA_OP = "GroupQueryAttention"

# Slots of GroupQueryAttention that hold the cache; its outputs have the attention result first.
PAST_KEY, PAST_VALUE = 3, 4
PRESENT_KEY, PRESENT_VALUE = 1, 2


@dataclass(frozen=True)
class CacheLayer:
    """One attention layer with a cache.

    `past_*` and `present_*` are names of the main graph's ports, `dtype` is the cache's element type as numpy spells it
    (`float16`), `window` is `local_window_size` in tokens or None where the layer sees everything. `token_stride` and
    `token_offset` are in elements and None unless the layout is interleaved.
    """

    node: str
    past_key: str
    past_value: str
    present_key: str
    present_value: str
    shape: LayerShape
    dtype: str
    query_heads: int
    window: int | None
    layout: KvLayout
    token_stride: int | None
    token_offset: int | None


@dataclass(frozen=True)
class NodeCall:
    """A node where it is executed: `name` says on which way, `resolve` leads its values out to the main graph's.

    A node of a function is one object with as many calls as the function has.
    """

    node: ir.Node
    name: str
    outer: Mapping[ir.Value, ir.Value] = field(repr=False)

    def resolve(self, value: ir.Value | None) -> ir.Value | None:
        """Return the outermost value that `value` is, through the bodies and calls around the node."""
        while value is not None and value in self.outer:
            value = self.outer[value]
        return value

    def input(self, slot: int) -> ir.Value | None:
        """The outermost value at an input slot, None where the slot is absent or empty."""
        return self.resolve(self.node.inputs[slot]) if slot < len(self.node.inputs) else None

    def output(self, slot: int) -> ir.Value | None:
        """The outermost value at an output slot, None where the slot is absent or unnamed."""
        if slot >= len(self.node.outputs) or not self.node.outputs[slot].name:
            return None
        return self.resolve(self.node.outputs[slot])


def node_calls(model: ir.Model) -> Iterator[NodeCall]:
    """Yield every node of the model once for each way in which it is reached, in execution order."""
    return _calls(model, model.graph, "", {})


def is_gqa(node: ir.Node) -> bool:
    """Whether `node` is ONNX Runtime's GroupQueryAttention."""
    return node.domain == GQA_DOMAIN and node.op_type == GQA_OP


def attention_layers(model: ir.Model) -> tuple[CacheLayer, ...]:
    """Return the model's attention layers that have a cache, in the order of the graph's inputs.

    Raises:
        ModelDirError: a cache does not lead to ports of the main graph, or its geometry is not in the graph; names the
            nodes.
    """
    order = {value: index for index, value in enumerate(model.graph.inputs)}
    outputs = set(model.graph.outputs)
    layers: list[tuple[int, CacheLayer]] = []
    problems: list[str] = []
    for call in node_calls(model):
        if not is_gqa(call.node) or call.input(PAST_KEY) is None:
            continue
        try:
            layer = _layer(call, order, outputs)
        except ModelDirError as error:
            problems.append(str(error))
            continue
        layers.append((order[call.input(PAST_KEY)], layer))  # type: ignore[index]
    if problems:
        raise ModelDirError("\n".join(problems))
    return tuple(layer for _, layer in sorted(layers, key=lambda item: item[0]))


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """The value of an integer attribute, `default` where the node has none of this name."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def kv_layout(node: ir.Node) -> KvLayout:
    """The layout stamped on a GroupQueryAttention node; no attribute means head-major.

    Raises:
        ModelDirError: the attribute's number is no layout.
    """
    number = int_attribute(node, KV_LAYOUT_ATTRIBUTE, KvLayout.HEAD_MAJOR)
    try:
        return KvLayout(number)
    except ValueError:
        raise ModelDirError(f"node {node.name!r}: {KV_LAYOUT_ATTRIBUTE}={number} is no KV layout") from None


def cache_shape(call: NodeCall) -> LayerShape:
    """KV heads and head size of the cache that a GroupQueryAttention node reads and writes.

    Raises:
        ModelDirError: the graph does not say them.
    """
    kv_heads = int_attribute(call.node, "kv_num_heads", 0)
    for value in (call.input(PAST_KEY), call.output(PRESENT_KEY)):
        if value is not None and value.shape is not None and len(value.shape) == 4:
            heads, head_dim = value.shape[1], value.shape[3]
            if isinstance(heads, int) and kv_heads and heads != kv_heads:
                raise ModelDirError(
                    f"node {call.name!r}: {value.name!r} has {heads} heads, but the node kv_num_heads={kv_heads}"
                )
            if isinstance(head_dim, int) and kv_heads:
                return LayerShape(kv_heads, head_dim)
    raise ModelDirError(
        f"node {call.name!r}: the cache's geometry is unknown; it needs kv_num_heads and a past_key declared as "
        "[batch, kv_heads, capacity, head_dim]"
    )


def _layer(call: NodeCall, order: Mapping[ir.Value, int], outputs: set[ir.Value]) -> CacheLayer:
    names = {}
    for port, value, ports in (
        ("past_key", call.input(PAST_KEY), order),
        ("past_value", call.input(PAST_VALUE), order),
        ("present_key", call.output(PRESENT_KEY), outputs),
        ("present_value", call.output(PRESENT_VALUE), outputs),
    ):
        if value is None or value not in ports:
            kind = "an input" if ports is order else "an output"
            raise ModelDirError(f"node {call.name!r}: {port} is not {kind} of the model's graph")
        names[port] = value.name or ""
    past_key = call.input(PAST_KEY)
    if past_key is None or past_key.dtype is None:
        raise ModelDirError(f"node {call.name!r}: {names['past_key']!r} has no element type")
    node = call.node
    window = int_attribute(node, "local_window_size", -1)
    interleaved = kv_layout(node).interleaved
    return CacheLayer(
        node=call.name,
        shape=cache_shape(call),
        dtype=past_key.dtype.name.lower() if past_key.dtype.name.startswith("BFLOAT") else str(past_key.dtype.numpy()),
        query_heads=int_attribute(node, "num_heads", 0),
        window=window if window > 0 else None,
        layout=kv_layout(node),
        token_stride=int_attribute(node, TOKEN_STRIDE_ATTRIBUTE, 0) if interleaved else None,
        token_offset=int_attribute(node, TOKEN_OFFSET_ATTRIBUTE, 0) if interleaved else None,
        **names,
    )


def _calls(
    model: ir.Model, graph: ir.Graph | ir.Function, prefix: str, outer: Mapping[ir.Value, ir.Value]
) -> Iterator[NodeCall]:
    for node in graph:
        name = prefix + (node.name or next((value.name for value in node.outputs if value.name), None) or node.op_type)
        yield NodeCall(node, name, outer)
        function = model.functions.get(node.op_identifier())
        if function is not None:
            ports = _pairs(function.inputs, node.inputs) | _pairs(function.outputs, node.outputs)
            yield from _calls(model, function, f"{name}/", {**outer, **ports})
        for body in _bodies(node):
            yield from _calls(model, body, f"{name}/", {**outer, **_body_ports(node, body)})


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _body_ports(node: ir.Node, body: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Which value of the outer graph each state variable of a body is; per-iteration values lead nowhere."""
    match node.op_type:
        case "If":
            return _pairs(body.outputs, node.outputs)
        case "Loop":  # body: iteration, condition, state… → condition, state…, scan outputs…
            states = len(node.inputs) - 2
            return _pairs(body.inputs[2:], node.inputs[2:]) | _pairs(body.outputs[1 : 1 + states], node.outputs)
        case "Scan":
            states = len(node.inputs) - int_attribute(node, "num_scan_inputs", 0)
            return _pairs(body.inputs[:states], node.inputs) | _pairs(body.outputs[:states], node.outputs)
        case _:
            return {}


def _pairs(inner: object, outer: object) -> dict[ir.Value, ir.Value]:
    return {i: o for i, o in zip(inner, outer, strict=False) if i is not None and o is not None}  # type: ignore[call-overload]
