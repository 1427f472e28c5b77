from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnx_kv.errors import ModelDirError
from onnx_kv.graph import attention_layers, node_calls
from onnx_kv.layout import KvLayout, LayerShape
from tests.support.nested_models import in_branches, in_function, in_loop, in_scan
from tests.support.tiny_model import HEAD_DIM, HEADS, KV_HEADS, node, tiny_model


def layers(model: onnx.ModelProto) -> list[tuple[str, str, str]]:
    return [(x.node, x.past_key, x.present_value) for x in attention_layers(ir.from_proto(model))]


def test_layers_of_an_exported_graph() -> None:
    first, second = attention_layers(ir.from_proto(tiny_model(local_window_size=16)))
    assert (first.node, second.node) == ("layer.0/attention", "layer.1/attention")
    assert (first.past_key, first.past_value) == ("past.0.key", "past.0.value")
    assert (first.present_key, first.present_value) == ("present.0.key", "present.0.value")
    assert first.shape == LayerShape(KV_HEADS, HEAD_DIM)
    assert (first.dtype, first.query_heads, first.window) == ("float32", HEADS, 16)
    assert (first.layout, first.token_stride, first.token_offset) == (KvLayout.HEAD_MAJOR, None, None)


def test_stamped_nodes_show_layout_and_strides() -> None:
    model = tiny_model(layers=1, kv_layout=3, kv_token_stride=16, kv_token_offset=4)
    (layer,) = attention_layers(ir.from_proto(model))
    assert (layer.layout, layer.token_stride, layer.token_offset) == (KvLayout.TOKEN_MAJOR, 16, 4)


def test_layers_come_in_the_order_of_the_inputs() -> None:
    model = tiny_model(layers=3)
    inputs = list(model.graph.input)
    inputs.sort(key=lambda item: item.name, reverse=True)
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    assert [name for name, _, _ in layers(model)] == [f"layer.{i}/attention" for i in (2, 1, 0)]


@pytest.mark.parametrize(
    ("known", "dtype"), [("past", "float16"), ("output", "float16"), ("query", "bfloat16"), ("key", "float32")]
)
def test_the_head_size_comes_from_whichever_shape_tells_it(known: str, dtype: str) -> None:
    model = tiny_model(layers=1)
    kind = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float32": TensorProto.FLOAT}[dtype]
    for item in (*model.graph.input, *model.graph.output):
        if "past" in item.name or "present" in item.name:
            item.type.tensor_type.elem_type = kind
            if known == "past":
                item.type.tensor_type.shape.dim[3].dim_value = HEAD_DIM
    del model.graph.value_info[:]
    attention = node(model, "layer.0/attention")
    sizes = {"output": ("layer.0/attended", HEADS), "query": ("layer.0/qkv", HEADS + 2 * KV_HEADS)}
    if known == "key":
        attention.input[1] = attention.input[2] = "separate_key"
        sizes["key"] = ("separate_key", KV_HEADS)
    if known in sizes:
        name, vectors = sizes[known]
        model.graph.value_info.append(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "s", vectors * HEAD_DIM])
        )
        if known == "key":
            model.graph.node.insert(0, helper.make_node("Constant", [], ["separate_key"], value_float=0.0))
    (layer,) = attention_layers(ir.from_proto(model))
    assert (layer.shape, layer.dtype) == (LayerShape(KV_HEADS, HEAD_DIM), dtype)


def test_branches_serve_one_cache() -> None:
    assert layers(in_branches()) == [("choose/attention", "past.0.key", "present.0.value")]


def test_a_function_has_a_layer_for_each_call() -> None:
    assert layers(in_function()) == [
        ("call.0/attention", "past.0.key", "present.0.value"),
        ("call.1/attention", "past.1.key", "present.1.value"),
    ]
    # The node's head counts are attributes of the function, given by its calls or its defaults.
    found = attention_layers(ir.from_proto(in_function()))
    assert {(layer.query_heads, layer.shape) for layer in found} == {(HEADS, LayerShape(KV_HEADS, HEAD_DIM))}


@pytest.mark.parametrize("build", [in_loop, in_scan])
def test_states_of_a_loop_lead_to_the_models_ports(build: Callable[[], onnx.ModelProto]) -> None:
    assert layers(build()) == [("repeat/attention", "past.0.key", "present.0.value")]


def test_every_call_of_every_node_is_walked() -> None:
    names = [call.name for call in node_calls(ir.from_proto(in_function()))]
    assert names.count("call.0/attention") == names.count("call.1/attention") == 1
    assert "call.0" in names


def cut_past(model: onnx.ModelProto) -> None:
    node(model, "layer.0/attention").input[3] = ""


def compute_past(model: onnx.ModelProto) -> None:
    node(model, "layer.0/attention").input[3] = "copy"
    model.graph.node.insert(0, helper.make_node("Identity", ["past.0.key"], ["copy"]))


def hide_present(model: onnx.ModelProto) -> None:
    del model.graph.output[2]


def strip_shapes(model: onnx.ModelProto) -> None:
    del model.graph.value_info[:]


def contradict_heads(model: onnx.ModelProto) -> None:
    next(item for item in node(model, "layer.0/attention").attribute if item.name == "kv_num_heads").i = 2


def no_heads(model: onnx.ModelProto) -> None:
    del node(model, "layer.0/attention").attribute[:]


def unknown_layout(model: onnx.ModelProto) -> None:
    node(model, "layer.0/attention").attribute.append(helper.make_attribute("kv_layout", 9))


def text_layout(model: onnx.ModelProto) -> None:
    node(model, "layer.0/attention").attribute.append(helper.make_attribute("kv_layout", "seq"))


def disagree(model: onnx.ModelProto) -> None:
    attention = node(model, "layer.1/attention")
    attention.input[3], attention.input[4] = "past.0.key", "past.1.value"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_past, "has no past_key"),
        (compute_past, "its past_key 'copy' is no input of the model"),
        (hide_present, "its present_value 'present.0.value' is no output of the model"),
        (strip_shapes, "its head size is unknown"),
        (contradict_heads, "kv_num_heads=2, but the cache has 1 heads"),
        (no_heads, "needs positive num_heads"),
        (unknown_layout, "kv_layout=9 is no KV layout"),
        (text_layout, "attribute kv_layout is STRING, not an integer"),
        (disagree, "node 'layer.1/attention' reads 'past.0.key' otherwise than node 'layer.0/attention' does"),
    ],
)
def test_what_is_not_understood_is_an_error_that_names_the_node(
    change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    model = tiny_model()
    change(model)
    with pytest.raises(ModelDirError) as caught:
        attention_layers(ir.from_proto(model))
    assert message in str(caught.value)
    assert "'layer." in str(caught.value)
