"""Models whose attention is not in the main graph: in branches, loop bodies and functions. Each has whole caches."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.tiny_model import HEAD_DIM, HEADS, KV_HEADS, OPSETS, WIDTH, attention_node, cache_ports, port

PACKED = (HEADS + 2 * KV_HEADS) * HEAD_DIM
PRESENT = ("present.0.key", "present.0.value")


def _model(nodes: list[onnx.NodeProto], layers: int, constants: list[TensorProto], **fields: object) -> onnx.ModelProto:
    past, present = cache_ports(range(layers))
    inputs = [
        port("query", TensorProto.FLOAT, "batch", "sequence", PACKED),
        port("lengths", TensorProto.INT32, "batch"),
        port("total", TensorProto.INT32, 1),
        *past,
    ]
    outputs = [port("attended", TensorProto.FLOAT, "batch", "sequence", WIDTH), *present]
    graph = helper.make_graph(nodes, "nested", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10, **fields)


def _constant(name: str, value: object, kind: type) -> TensorProto:
    return numpy_helper.from_array(np.array(value, kind), name)


def _renamed(node: onnx.NodeProto, name: str, **ports: str) -> onnx.NodeProto:
    """A copy of a node with another name and other names for some of its ports."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = name
    for side in (copy.input, copy.output):
        side[:] = [ports.get(item.replace(".", "_"), item) for item in side]
    return copy


def in_branches() -> onnx.ModelProto:
    """An If whose two branches attend over the same cache."""

    def branch(prefix: str) -> onnx.GraphProto:
        names = {"attended": f"{prefix}a", "present_0_key": f"{prefix}k", "present_0_value": f"{prefix}v"}
        attention = _renamed(attention_node(0, "query", "attended"), "attention", **names)
        outputs = [port(name, TensorProto.FLOAT, "b", "s", WIDTH) for name in list(names.values())[:1]]
        outputs += [port(name, TensorProto.FLOAT, "b", KV_HEADS, "c", "d") for name in list(names.values())[1:]]
        return helper.make_graph([attention], prefix, [], outputs)

    choose = helper.make_node(
        "If", ["flag"], ["attended", *PRESENT], "choose", then_branch=branch("then_"), else_branch=branch("else_")
    )
    return _model([choose], 1, [_constant("flag", True, np.bool_)])


def in_loop() -> onnx.ModelProto:
    """A Loop whose states are the two halves of the cache."""
    names = {"past_0_key": "k_in", "past_0_value": "v_in", "present_0_key": "k_out", "present_0_value": "v_out"}
    attention = _renamed(attention_node(0, "query", "result"), "attention", **names)
    going_on = helper.make_node("Identity", ["again"], ["go_on"])
    states = [port(name, TensorProto.FLOAT, "b", KV_HEADS, "c", "d") for name in ("k_in", "v_in", "k_out", "v_out")]
    body = helper.make_graph(
        [attention, going_on],
        "body",
        [port("i", TensorProto.INT64), port("again", TensorProto.BOOL), *states[:2]],
        [port("go_on", TensorProto.BOOL), *states[2:], port("result", TensorProto.FLOAT, "b", "s", WIDTH)],
    )
    repeat = helper.make_node(
        "Loop", ["trips", "flag", "past.0.key", "past.0.value"], [*PRESENT, "attended"], "repeat", body=body
    )
    return _model([repeat], 1, [_constant("flag", True, np.bool_), _constant("trips", 1, np.int64)])


def in_scan() -> onnx.ModelProto:
    """A Scan over one slice whose states are the two halves of the cache."""
    names = {"past_0_key": "k_in", "past_0_value": "v_in", "present_0_key": "k_out", "present_0_value": "v_out"}
    attention = _renamed(attention_node(0, "query", "result"), "attention", **names)
    states = [port(name, TensorProto.FLOAT, "b", KV_HEADS, "c", "d") for name in ("k_in", "v_in", "k_out", "v_out")]
    body = helper.make_graph(
        [attention],
        "body",
        [*states[:2], port("slice", TensorProto.INT64)],
        [*states[2:], port("result", TensorProto.FLOAT, "b", "s", WIDTH)],
    )
    repeat = helper.make_node(
        "Scan", ["past.0.key", "past.0.value", "one"], [*PRESENT, "attended"], "repeat", body=body, num_scan_inputs=1
    )
    return _model([repeat], 1, [_constant("one", [1], np.int64)])


def in_function() -> onnx.ModelProto:
    """Two calls of one function; the head counts are attributes of it, one given by each call, one by default."""
    attention = helper.make_node(
        "GroupQueryAttention",
        ["q", "", "", "pk", "pv", "n", "t"],
        ["a", "k", "v"],
        "attention",
        domain="com.microsoft",
    )
    for name in ("num_heads", "kv_num_heads"):
        attention.attribute.add(name=name, type=onnx.AttributeProto.INT, ref_attr_name=name)
    function = helper.make_function(
        "local",
        "Attend",
        ["q", "pk", "pv", "n", "t"],
        ["a", "k", "v"],
        [attention],
        OPSETS,
        attributes=["num_heads"],
        attribute_protos=[helper.make_attribute("kv_num_heads", KV_HEADS)],
    )
    calls = [
        helper.make_node(
            "Attend",
            ["query", f"past.{i}.key", f"past.{i}.value", "lengths", "total"],
            [f"attended.{i}", f"present.{i}.key", f"present.{i}.value"],
            f"call.{i}",
            domain="local",
            num_heads=HEADS,
        )
        for i in range(2)
    ]
    calls.append(helper.make_node("Add", ["attended.0", "attended.1"], ["attended"], "sum"))
    model = _model(calls, 2, [], functions=[function])
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model
