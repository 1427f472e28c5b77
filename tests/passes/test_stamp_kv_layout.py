from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnx_kv.errors import PatchRefusedError
from onnx_kv.layout import KvLayout
from onnx_kv.passes import StampKvLayout, applied_passes
from onnx_kv.patching import patch_model
from tests.support import stock_ort
from tests.support.nested_models import in_branches, in_function, in_loop, in_scan
from tests.support.tiny_model import HEAD_DIM, KV_HEADS, attention_node, contents, node, tiny_model, write_model_dir

TOKEN = KV_HEADS * HEAD_DIM  # elements a token, layer and side


def gqa_nodes(model: ir.Model) -> list[ir.Node]:
    found = [item for item in model.graph.all_nodes() if item.op_type == "GroupQueryAttention"]
    for function in model.functions.values():
        found += [item for item in function.all_nodes() if item.op_type == "GroupQueryAttention"]
    return found


def stamps(model: ir.Model) -> list[dict[str, int]]:
    names = ("kv_layout", "kv_token_stride", "kv_token_offset")
    return [{k: item.attributes[k].as_int() for k in names if k in item.attributes} for item in gqa_nodes(model)]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (KvLayout.HEAD_MAJOR, [{}, {}, {}]),
        (KvLayout.SEQ_MAJOR, [{"kv_layout": 1}] * 3),
        (KvLayout.PAIRED, [{"kv_layout": 2, "kv_token_stride": 2 * TOKEN, "kv_token_offset": 0}] * 3),
        (
            KvLayout.TOKEN_MAJOR,
            [{"kv_layout": 3, "kv_token_stride": 6 * TOKEN, "kv_token_offset": i * 2 * TOKEN} for i in range(3)],
        ),
    ],
)
def test_every_layout_is_stamped_and_undone(layout: KvLayout, expected: list[dict[str, int]]) -> None:
    source = tiny_model(layers=3)
    model = ir.from_proto(source)
    report = StampKvLayout(layout)(model)
    assert stamps(model) == expected
    assert report.modified is (layout is not KvLayout.HEAD_MAJOR)
    assert applied_passes(model) == (("stamp_kv_layout",) if report.modified else ())
    again = StampKvLayout(layout)(model)
    assert (again.modified, again.outcome.changes) == (False, ())
    StampKvLayout(KvLayout.HEAD_MAJOR)(model)
    assert ir.to_proto(model) == ir.to_proto(ir.from_proto(source))


def test_one_layout_follows_another() -> None:
    model = ir.from_proto(tiny_model())
    for layout in (KvLayout.TOKEN_MAJOR, KvLayout.SEQ_MAJOR, KvLayout.PAIRED, KvLayout.TOKEN_MAJOR):
        report = StampKvLayout(layout)(model)
    assert report.outcome.changes == ("2 nodes: paired to token-major",)
    direct = ir.from_proto(tiny_model())
    StampKvLayout(KvLayout.TOKEN_MAJOR)(direct)
    assert ir.to_proto(model) == ir.to_proto(direct)


def test_layers_of_different_widths_have_offsets_of_their_own() -> None:
    model = tiny_model(layers=2)
    wide = node(model, "layer.1/attention")
    next(item for item in wide.attribute if item.name == "kv_num_heads").i = 2
    for item in (*model.graph.input, *model.graph.output):
        if ".1." in item.name:
            item.type.tensor_type.shape.dim[1].dim_value = 2
    graph = ir.from_proto(model)
    StampKvLayout(KvLayout.TOKEN_MAJOR)(graph)
    first, second = stamps(graph)
    assert first == {"kv_layout": 3, "kv_token_stride": 6 * HEAD_DIM, "kv_token_offset": 0}
    assert second == {"kv_layout": 3, "kv_token_stride": 6 * HEAD_DIM, "kv_token_offset": 2 * HEAD_DIM}


@pytest.mark.parametrize("build", [in_branches, in_loop, in_scan])
@pytest.mark.parametrize("layout", list(KvLayout)[1:])
def test_bodies_are_stamped(build: Callable[[], onnx.ModelProto], layout: KvLayout) -> None:
    model = ir.from_proto(build())
    StampKvLayout(layout)(model)
    assert {stamp["kv_layout"] for stamp in stamps(model)} == {layout}
    assert {stamp.get("kv_token_offset", 0) for stamp in stamps(model)} == {0}
    StampKvLayout(KvLayout.HEAD_MAJOR)(model)
    assert ir.to_proto(model) == ir.to_proto(ir.from_proto(build()))


def test_functions_are_stamped_where_one_stamp_fits_all_calls() -> None:
    for layout in (KvLayout.SEQ_MAJOR, KvLayout.PAIRED):
        model = ir.from_proto(in_function())
        StampKvLayout(layout)(model)
        assert [stamp["kv_layout"] for stamp in stamps(model)] == [layout]
    model = ir.from_proto(in_function())
    with pytest.raises(PatchRefusedError, match=r"node 'call.1/attention' is in a function that several layers call"):
        StampKvLayout(KvLayout.TOKEN_MAJOR)(model)


def test_a_window_sized_cache_becomes_a_full_one() -> None:
    model = ir.from_proto(tiny_model(local_window_size=16, sliding_window_cache=1))
    report = StampKvLayout(KvLayout.SEQ_MAJOR)(model)
    assert "2 nodes: sliding_window_cache=1 cleared, local_window_size stays" in report.outcome.changes
    for item in gqa_nodes(model):
        assert "sliding_window_cache" not in item.attributes
        assert item.attributes["local_window_size"].as_int() == 16


def test_declared_shapes_and_everything_else_stay() -> None:
    source = tiny_model()
    model = ir.from_proto(source)
    StampKvLayout(KvLayout.PAIRED)(model)
    result = ir.to_proto(model)
    assert (list(result.graph.input), list(result.graph.output)) == (
        list(source.graph.input),
        list(source.graph.output),
    )
    for item in result.graph.node:
        kept = [attribute for attribute in item.attribute if not attribute.name.startswith("kv_l")]
        kept = [attribute for attribute in kept if not attribute.name.startswith("kv_t")]
        assert kept == list(node(source, item.name).attribute)


def half_patched(model: onnx.ModelProto) -> None:
    node(model, "layer.1/attention").attribute.append(helper.make_attribute("kv_layout", 1))


def wrong_offset(model: onnx.ModelProto) -> None:
    for layer in (0, 1):
        attributes = {"kv_layout": 3, "kv_token_stride": 4 * TOKEN, "kv_token_offset": 0}
        item = node(model, f"layer.{layer}/attention")
        item.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())


def share_but_disagree(model: onnx.ModelProto) -> None:
    node(model, "layer.1/attention").input[3] = "past.0.key"


def swap_sides(model: onnx.ModelProto) -> None:
    second = node(model, "layer.1/attention")
    second.input[3], second.input[4] = second.input[4], second.input[3]
    first = node(model, "layer.0/attention")
    first.input[4] = "past.1.key"


def read_present(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("ReduceMax", ["present.0.key"], ["largest"], "spy"))


def read_past_in_branch(model: onnx.ModelProto) -> None:
    inner = helper.make_node("Transpose", ["past.0.value"], ["seen"], "spy")
    branch = helper.make_graph([inner], "b", [], [helper.make_tensor_value_info("seen", TensorProto.FLOAT, None)])
    nodes = [
        helper.make_node("Constant", [], ["flag"], value=helper.make_tensor("f", TensorProto.BOOL, [], [True])),
        helper.make_node("If", ["flag"], ["chosen"], "choose", then_branch=branch, else_branch=branch),
    ]
    model.graph.node.extend(nodes)


def attention_of_another_layer_reads_present(model: onnx.ModelProto) -> None:
    second = node(model, "layer.1/attention")
    second.input[3], second.input[4] = "present.0.key", "present.0.value"


def quantised(name: str, value: object) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        node(model, "layer.0/attention").attribute.append(helper.make_attribute(name, value))

    return change


def scale_input(model: onnx.ModelProto) -> None:
    item = node(model, "layer.0/attention")
    item.input.extend([""] * 5 + ["embedding"])


def cache_type(kind: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for item in (*model.graph.input, *model.graph.output):
            if ".0." in item.name:
                item.type.tensor_type.elem_type = kind

    return change


def value_type(model: onnx.ModelProto) -> None:
    for item in (*model.graph.input, *model.graph.output):
        if item.name.endswith(".0.value"):
            item.type.tensor_type.elem_type = TensorProto.FLOAT16


def output_qk(model: onnx.ModelProto) -> None:
    node(model, "layer.0/attention").output.append("qk")


def add_attention(domain: str, operator: str, past_slots: int, presents: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        inputs = ["hidden.0"] + [""] * (past_slots - 1) + ["embedding"]
        outputs = ["o", *[f"p{i}" for i in range(presents)]]
        model.graph.node.append(helper.make_node(operator, inputs, outputs, "other", domain=domain))

    return change


def no_attention(model: onnx.ModelProto) -> None:
    for layer in (0, 1):
        item = node(model, f"layer.{layer}/attention")
        item.op_type = "Custom"


def cut_past(model: onnx.ModelProto) -> None:
    node(model, "layer.0/attention").input[3] = ""


REFUSED = [
    (half_patched, "node 'layer.1/attention' is seq-major, the others are head-major: a half-patched model"),
    (wrong_offset, "node 'layer.1/attention' has {'kv_token_stride': 32, 'kv_token_offset': 0}"),
    (share_but_disagree, "node 'layer.1/attention' reads 'past.0.key' otherwise than node 'layer.0/attention' does"),
    (swap_sides, "node 'layer.1/attention' reads"),
    (read_present, "node 'spy' (ReduceMax) reads the present key 'present.0.key' of node 'layer.0/attention'"),
    (read_past_in_branch, "node 'choose/spy' (Transpose) reads the past value 'past.0.value'"),
    (attention_of_another_layer_reads_present, "its past_key 'present.0.key' is no input of the model"),
    (quantised("k_quant_type", "PER_TENSOR"), "node 'layer.0/attention': its cache is quantised (k_quant_type"),
    (quantised("v_quant_type", "PER_CHANNEL"), "its cache is quantised (v_quant_type=PER_CHANNEL)"),
    (quantised("kv_cache_bit_width", 4), "its cache is quantised (kv_cache_bit_width=4)"),
    (scale_input, "its cache is quantised (input k_scale)"),
    (cache_type(TensorProto.INT8), "its cache is quantised ('past.0.key' is INT8)"),
    (cache_type(TensorProto.UINT8), "('past.0.value' is UINT8)"),
    (cache_type(TensorProto.FLOAT8E4M3FN), "('present.0.key' is FLOAT8E4M3FN)"),
    (value_type, "'past.0.value' is FLOAT16, but its past key float32"),
    (quantised("causal", 0), "node 'layer.0/attention': it is not causal (causal=0)"),
    (quantised("qk_output", 1), "it outputs the product of query and key"),
    (output_qk, "it outputs the product of query and key"),
    (add_attention("com.microsoft", "MultiHeadAttention", 6, 0), "node 'other': MultiHeadAttention keeps a cache"),
    (add_attention("com.microsoft", "MultiHeadAttention", 1, 1), "node 'other': MultiHeadAttention keeps a cache"),
    (add_attention("", "Attention", 5, 2), "node 'other': Attention keeps a cache"),
    (add_attention("com.microsoft", "DecoderMaskedMultiHeadAttention", 5, 2), "DecoderMaskedMultiHeadAttention keeps"),
    (add_attention("com.microsoft", "PagedAttention", 3, 2), "node 'other': PagedAttention keeps a cache"),
    (no_attention, "it has no com.microsoft::GroupQueryAttention node"),
    (cut_past, "node 'layer.0/attention' has no past_key"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason[:60] for _, reason in REFUSED])
def test_refusals_name_node_and_reason_and_change_nothing(
    change: Callable[[onnx.ModelProto], None], reason: str
) -> None:
    source = tiny_model()
    change(source)
    model = ir.from_proto(source)
    before = ir.to_proto(model).SerializeToString()
    for layout in KvLayout:
        with pytest.raises(PatchRefusedError) as caught:
            StampKvLayout(layout)(model)
        assert any(reason in item for item in caught.value.reasons), caught.value.reasons
    assert ir.to_proto(model).SerializeToString() == before


def test_every_refusal_is_listed_at_once() -> None:
    model = tiny_model()
    quantised("kv_cache_bit_width", 8)(model)
    read_present(model)
    add_attention("", "Attention", 4, 2)(model)
    with pytest.raises(PatchRefusedError) as caught:
        StampKvLayout(KvLayout.SEQ_MAJOR)(ir.from_proto(model))
    assert len(caught.value.reasons) == 3


def test_what_stays_true_in_every_layout_is_no_reason_to_refuse() -> None:
    model = tiny_model()
    item = node(model, "layer.0/attention")
    item.attribute.extend([helper.make_attribute("k_quant_type", "NONE"), helper.make_attribute("causal", 1)])
    item.attribute.append(helper.make_attribute("kv_cache_bit_width", 0))
    model.graph.node.append(helper.make_node("Shape", ["past.0.key"], ["shape"], "shape"))
    model.graph.node.append(helper.make_node("Shape", ["present.0.key"], ["shape2"], "shape2"))
    model.graph.node.append(helper.make_node("MultiHeadAttention", ["hidden.0"], ["o"], domain="com.microsoft"))
    graph = ir.from_proto(model)
    assert StampKvLayout(KvLayout.TOKEN_MAJOR)(graph).modified


def test_attention_without_a_cache_gets_the_layout_alone() -> None:
    model = tiny_model(layers=1)
    bare = attention_node(0, "layer.0/qkv", "unused")
    bare.name, bare.input[3], bare.input[4] = "bare", "", ""
    del bare.output[1:]
    model.graph.node.append(bare)
    graph = ir.from_proto(model)
    StampKvLayout(KvLayout.PAIRED)(graph)
    assert stamps(graph)[1] == {"kv_layout": 2}


def test_different_element_types_cannot_share_a_token() -> None:
    model = tiny_model()
    cache_type(TensorProto.FLOAT16)(model)
    with pytest.raises(PatchRefusedError, match="different element types, which token-major"):
        StampKvLayout(KvLayout.TOKEN_MAJOR)(ir.from_proto(model))
    assert StampKvLayout(KvLayout.PAIRED)(ir.from_proto(model)).modified


MODELS = sorted(Path(__file__).parents[2].glob("models/*/genai_config.json"))


@pytest.mark.parametrize("config", MODELS, ids=lambda file: file.parent.name)
def test_exported_models_go_to_every_layout_and_back(config: Path, tmp_path: Path) -> None:
    source = config.parent
    patch_model(source, tmp_path / "start", "head-major")  # without window-sized caches, which are gone for good
    for layout in list(KvLayout)[1:]:
        patch_model(source, tmp_path / layout.cli_name, layout)
        patch_model(tmp_path / layout.cli_name, tmp_path / "back", "head-major", force=True)
        assert contents(tmp_path / "back") == contents(tmp_path / "start")
    windowed = b"sliding_window_cache" in (source / "model.onnx").read_bytes()
    assert (contents(tmp_path / "start") == contents(source)) is not windowed


def test_head_major_again_loads_in_stock_onnxruntime_with_the_same_outputs(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    patch_model(source, tmp_path / "seq", "seq-major")
    patch_model(tmp_path / "seq", tmp_path / "back", "head-major")
    expected = stock_ort.run(source / "model.onnx", [[1, 5, 2], [7, 7, 7]])
    found = stock_ort.run(tmp_path / "back" / "model.onnx", [[1, 5, 2], [7, 7, 7]])
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_stock_onnxruntime_refuses_the_stamp(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    patch_model(source, tmp_path / "seq", "seq-major")
    with pytest.raises(Exception, match="kv_layout"):
        stock_ort.run(tmp_path / "seq" / "model.onnx", [[1]])
