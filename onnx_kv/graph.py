"""What a model's graph says about its attention: every GroupQueryAttention node and the cache it reads and writes.

Nodes are found wherever ONNX lets them be: in the main graph, in the bodies of If, Loop and Scan, and in model-local
functions, there once for each call. A cache is known by the *ports* (inputs and outputs of the main graph) that a
node's past and present lead to; names of ports are data and are never taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onnx_kv.errors import ModelDirError
from onnx_kv.layout import KV_LAYOUT_ATTRIBUTE, TOKEN_OFFSET_ATTRIBUTE, TOKEN_STRIDE_ATTRIBUTE, KvLayout, LayerShape

PASSES_KEY = "onnx_kv.passes"
"""Key of the model's metadata_props that names the passes applied."""

GQA = ("com.microsoft", "GroupQueryAttention")
"""Domain and type of the operator."""

# Slots of GroupQueryAttention; output 0 is the attention's result.
QUERY, KEY, PAST_KEY, PAST_VALUE, SEQLENS_K, TOTAL_SEQUENCE_LENGTH = 0, 1, 3, 4, 5, 6
PRESENT_KEY, PRESENT_VALUE = 1, 2

MAX_CALLS = 200_000
"""Nodes that are looked at: a real decoder has thousands, a few functions that call each other twice have billions."""


@dataclass(frozen=True)
class CacheLayer:
    """One attention layer with a cache.

    `past_*` and `present_*` are names of the main graph's ports, `dtype` is the cache's element type as numpy spells it
    (`float16`; also `bfloat16`), `window` is `local_window_size` in tokens or None where the layer sees everything.
    `token_stride` and `token_offset` are in elements and None unless the layout is interleaved. Where several nodes
    serve one cache (the branches of an If), `node` is the first.
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
    """A node where it is executed; a node of a function is one object with as many calls as the function has.

    `name` is the node's name behind those of the nodes around it, as in `layer_3/attention`. `values` leads from the
    values of a body or function out to those of the graph around it, `arguments` are the attributes of the function
    call that the node is in.
    """

    node: ir.Node
    name: str
    values: Mapping[ir.Value, ir.Value] = field(repr=False)
    arguments: Mapping[str, ir.Attr] = field(repr=False)

    def input(self, slot: int) -> ir.Value | None:
        """The outermost value at an input slot, None where the slot is absent or empty."""
        return self._outermost(self.node.inputs[slot]) if slot < len(self.node.inputs) else None

    def output(self, slot: int) -> ir.Value | None:
        """The outermost value at an output slot, None where the slot is absent or unnamed."""
        if slot >= len(self.node.outputs) or not self.node.outputs[slot].name:
            return None
        return self._outermost(self.node.outputs[slot])

    def attribute(self, name: str) -> ir.Attr | None:
        """The attribute `name`, taken from the function's call where the node refers to one of its attributes."""
        attribute = self.node.attributes.get(name)
        if attribute is not None and attribute.is_ref():
            return self.arguments.get(attribute.ref_attr_name or "")
        return attribute

    def integer(self, name: str, default: int) -> int:
        """The integer attribute `name`, `default` where there is none.

        Raises:
            ModelDirError: the attribute is no integer.
        """
        attribute = self.attribute(name)
        if attribute is None:
            return default
        if attribute.type is not ir.AttributeType.INT:
            raise ModelDirError(f"node {self.name!r}: attribute {name} is {attribute.type.name}, not an integer")
        return attribute.as_int()

    def _outermost(self, value: ir.Value | None) -> ir.Value | None:
        while value is not None and value in self.values:
            value = self.values[value]
        return value


def node_calls(model: ir.Model) -> Iterator[NodeCall]:
    """Yield every node of the model once for each way in which it is reached, in the graph's order.

    Raises:
        ModelDirError: a function calls itself, or functions call each other so often that there is no end in sight.
    """
    for count, call in enumerate(_calls(model, model.graph, "", {}, {}, ())):
        if count == MAX_CALLS:
            raise ModelDirError(f"node {call.name!r}: its functions are called more than {MAX_CALLS:,} times")
        yield call


def reads(model: ir.Model, call: NodeCall) -> Iterator[tuple[int, ir.Value]]:
    """Yield (input slot, outermost value) of all that a node itself reads.

    What a function call or a loop only passes on as a state is read, if at all, by nodes inside.
    """
    if call.node.op_identifier() in model.functions:
        return
    passed_on = _states(call)
    for slot in range(len(call.node.inputs)):
        value = call.input(slot)
        if value is not None and slot not in passed_on:
            yield slot, value


def is_gqa(node: ir.Node) -> bool:
    """Whether `node` is ONNX Runtime's GroupQueryAttention."""
    return (node.domain, node.op_type) == GQA


def applied_passes(model: ir.Model) -> tuple[str, ...]:
    """Names of the passes recorded in the model's metadata, sorted."""
    return tuple(sorted(filter(None, model.metadata_props.get(PASSES_KEY, "").split(","))))


def attention_layers(model: ir.Model) -> tuple[CacheLayer, ...]:
    """Return the model's attention layers that have a cache, in the order of the graph's inputs.

    Raises:
        ModelDirError: a cache does not lead to ports of the main graph, its geometry is not in the graph, or nodes that
            share a cache disagree about it; names every node at fault.
    """
    calls = [call for call in node_calls(model) if is_gqa(call.node) and has_cache(call)]
    layers: dict[str, CacheLayer] = {}
    problems: list[str] = []
    for call in calls:
        try:
            layer = cache_layer(model, call)
        except ModelDirError as error:
            problems.append(str(error))
            continue
        first = layers.setdefault(layer.past_key, layer)
        if replace(layer, node=first.node) != first:
            problems.append(f"node {layer.node!r} reads {layer.past_key!r} otherwise than node {first.node!r} does")
    if problems:
        raise ModelDirError("\n".join(problems))
    order = {value.name: index for index, value in enumerate(model.graph.inputs)}
    return tuple(sorted(layers.values(), key=lambda layer: order[layer.past_key]))


def has_cache(call: NodeCall) -> bool:
    """Whether a GroupQueryAttention node reads or writes a cache."""
    return any(call.input(slot) for slot in (PAST_KEY, PAST_VALUE)) or any(
        call.output(slot) for slot in (PRESENT_KEY, PRESENT_VALUE)
    )


def cache_layer(model: ir.Model, call: NodeCall) -> CacheLayer:
    """Describe the cache of one GroupQueryAttention node.

    Raises:
        ModelDirError: as `attention_layers`.
    """
    past_key = _port(call, "past_key", call.input(PAST_KEY), model.graph.inputs)
    layout = kv_layout(call)
    window = call.integer("local_window_size", -1)
    return CacheLayer(
        node=call.name,
        past_key=past_key.name or "",
        past_value=_port(call, "past_value", call.input(PAST_VALUE), model.graph.inputs).name or "",
        present_key=_port(call, "present_key", call.output(PRESENT_KEY), model.graph.outputs).name or "",
        present_value=_port(call, "present_value", call.output(PRESENT_VALUE), model.graph.outputs).name or "",
        shape=_cache_shape(call),
        dtype=_dtype(call, past_key),
        query_heads=call.integer("num_heads", 0),
        window=window if window > 0 else None,
        layout=layout,
        token_stride=call.integer(TOKEN_STRIDE_ATTRIBUTE, 0) if layout.interleaved else None,
        token_offset=call.integer(TOKEN_OFFSET_ATTRIBUTE, 0) if layout.interleaved else None,
    )


def _port(call: NodeCall, role: str, value: ir.Value | None, ports: Sequence[ir.Value]) -> ir.Value:
    if value is None:
        raise ModelDirError(f"node {call.name!r} has no {role}, but another half of a cache")
    if not any(value is port for port in ports):
        side = "input" if role.startswith("past") else "output"
        raise ModelDirError(f"node {call.name!r}: its {role} {value.name!r} is no {side} of the model")
    return value


def kv_layout(call: NodeCall) -> KvLayout:
    """The layout stamped on a GroupQueryAttention node; without a stamp it is head-major.

    Raises:
        ModelDirError: the attribute's number is no layout.
    """
    number = call.integer(KV_LAYOUT_ATTRIBUTE, KvLayout.HEAD_MAJOR)
    try:
        return KvLayout(number)
    except ValueError:
        raise ModelDirError(f"node {call.name!r}: {KV_LAYOUT_ATTRIBUTE}={number} is no KV layout") from None


def _dtype(call: NodeCall, past_key: ir.Value) -> str:
    if past_key.dtype is None:
        raise ModelDirError(f"node {call.name!r}: {past_key.name!r} is declared without an element type")
    return str(past_key.dtype.numpy())


def _cache_shape(call: NodeCall) -> LayerShape:
    """KV heads and head size; exporters leave the cache's last axis symbolic, so other shapes may have to tell it."""
    heads, kv_heads = call.integer("num_heads", 0), call.integer("kv_num_heads", 0)
    if heads <= 0 or kv_heads <= 0:
        raise ModelDirError(f"node {call.name!r} needs positive num_heads and kv_num_heads")
    past = call.input(PAST_KEY)
    declared = _axis(past, 1)
    if declared not in (None, kv_heads):
        raise ModelDirError(f"node {call.name!r}: kv_num_heads={kv_heads}, but the cache has {declared} heads")
    packed = call.input(KEY) is None
    for value, vectors in (
        (past, 1),
        (call.output(PRESENT_KEY), 1),
        (call.output(0), heads),
        (call.input(KEY), kv_heads),
        (call.input(QUERY), heads + 2 * kv_heads if packed else heads),
    ):
        width = _axis(value, -1)
        if width is not None and width % vectors == 0:
            return LayerShape(kv_heads, width // vectors)
    raise ModelDirError(
        f"node {call.name!r}: its head size is unknown; the cache, the query or the node's result must be declared "
        "with a last axis of known size"
    )


def _axis(value: ir.Value | None, axis: int) -> int | None:
    """The declared size of an axis, None where it is unknown or symbolic."""
    if value is None or value.shape is None or value.shape.rank() <= max(axis, 0):
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def _calls(
    model: ir.Model,
    graph: ir.Graph | ir.Function,
    prefix: str,
    values: Mapping[ir.Value, ir.Value],
    arguments: Mapping[str, ir.Attr],
    callers: tuple[ir.Function, ...],
) -> Iterator[NodeCall]:
    for node in graph:
        call = NodeCall(node, prefix + _name(node), values, arguments)
        yield call
        function = model.functions.get(node.op_identifier())
        if function is not None:
            if function in callers:
                raise ModelDirError(f"node {call.name!r}: the function {function.name!r} calls itself")
            ports = _pairs(function.inputs, node.inputs) | _pairs(function.outputs, node.outputs)
            given = {name: call.attribute(name) or default for name, default in function.attributes.items()}
            yield from _calls(model, function, f"{call.name}/", {**values, **ports}, given, (*callers, function))
        for body in _bodies(node):
            yield from _calls(model, body, f"{call.name}/", {**values, **_body_ports(call, body)}, arguments, callers)


def _name(node: ir.Node) -> str:
    return node.name or next((value.name for value in node.outputs if value.name), None) or node.op_type


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH and not attribute.is_ref():
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS and not attribute.is_ref():
            yield from attribute.as_graphs()


def _body_ports(call: NodeCall, body: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Which value of the graph around it each state of a body is; what differs between iterations leads nowhere."""
    node = call.node
    match node.op_type:
        case "If":
            return _pairs(body.outputs, node.outputs)
        case "Loop":  # body: iteration, condition, states… → condition, states…, scan outputs…
            states = len(_states(call))
            return _pairs(body.inputs[2:], node.inputs[2:]) | _pairs(body.outputs[1 : 1 + states], node.outputs)
        case "Scan":  # body: states…, slices… → states…, slices…
            states = len(_states(call))
            return _pairs(body.inputs[:states], node.inputs) | _pairs(body.outputs[:states], node.outputs)
        case _:
            return {}


def _states(call: NodeCall) -> range:
    """The input slots of a loop that hold its states."""
    match call.node.op_type:
        case "Loop":
            return range(2, len(call.node.inputs))
        case "Scan":
            return range(len(call.node.inputs) - call.integer("num_scan_inputs", 0))
        case _:
            return range(0)


def _pairs(inner: Sequence[ir.Value], outer: Sequence[ir.Value | None]) -> dict[ir.Value, ir.Value]:
    return {value: around for value, around in zip(inner, outer, strict=False) if around is not None}
