from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnx_kv.errors import PatchRefusedError
from onnx_kv.passes import LiftSequenceLengths, applied_passes
from onnx_kv.patching import patch_model
from tests.support import stock_ort
from tests.support.nested_models import in_function
from tests.support.tiny_model import node, tiny_model, write_model_dir

MODELS = sorted(Path(__file__).parents[2].glob("models/*/genai_config.json"))


def lifted(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = ir.from_proto(model)
    report = LiftSequenceLengths()(graph)
    assert report.modified
    return ir.to_proto(graph)


def ports(model: onnx.ModelProto) -> dict[str, tuple[int, list[int | str]]]:
    found = {}
    for item in model.graph.input:
        kind = item.type.tensor_type
        found[item.name] = kind.elem_type, [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
    return found


def test_two_inputs_take_the_masks_place() -> None:
    source = tiny_model()
    result = lifted(source)
    names = [item.name for item in source.graph.input]
    place = names.index("attention_mask")
    names[place : place + 1] = ["seqlens_k", "total_sequence_length"]
    assert [item.name for item in result.graph.input] == names
    assert ports(result)["seqlens_k"] == (TensorProto.INT32, ["batch"])
    assert ports(result)["total_sequence_length"] == (TensorProto.INT32, [1])
    assert not any(item.name.startswith("mask/") for item in result.graph.node)
    assert not {"one", "axis_1"} & {item.name for item in result.graph.initializer}
    for layer in (0, 1):
        assert list(node(result, f"layer.{layer}/attention").input[5:7]) == ["seqlens_k", "total_sequence_length"]


def test_a_second_run_changes_nothing_and_undoing_is_refused() -> None:
    graph = ir.from_proto(tiny_model())
    LiftSequenceLengths()(graph)
    assert applied_passes(graph) == ("lift_sequence_lengths",)
    before = ir.to_proto(graph).SerializeToString()
    again = LiftSequenceLengths()(graph)
    assert (again.modified, again.outcome.notes) == (False, ("the sequence lengths are inputs of the model",))
    with pytest.raises(PatchRefusedError, match="patch the original instead"):
        LiftSequenceLengths(undo=True)(graph)
    assert ir.to_proto(graph).SerializeToString() == before
    assert not LiftSequenceLengths(undo=True)(ir.from_proto(tiny_model())).modified


def cast_first(model: onnx.ModelProto) -> None:
    """Sum → cast → subtract, in int32."""
    subtract, cast = node(model, "mask/Sub"), node(model, "mask/Cast")
    cast.input[0], cast.output[0] = "mask_sum", "sum32"
    subtract.input[0], subtract.input[1], subtract.output[0] = "sum32", "one32", "lengths"
    model.graph.node.remove(cast)
    model.graph.node.insert(1, cast)
    model.graph.initializer.append(helper.make_tensor("one32", TensorProto.INT32, [1], [1]))


def cast_before_sum(model: onnx.ModelProto) -> None:
    cast, total, subtract = node(model, "mask/Cast"), node(model, "mask/ReduceSum"), node(model, "mask/Sub")
    cast.input[0], cast.output[0], total.input[0] = "attention_mask", "mask32", "mask32"
    subtract.input[1], subtract.output[0] = "one32", "lengths"
    model.graph.node.remove(cast)
    model.graph.node.insert(0, cast)
    model.graph.initializer.append(helper.make_tensor("one32", TensorProto.INT32, [1], [1]))


def constant_nodes(model: onnx.ModelProto) -> None:
    for item in list(model.graph.initializer):
        if item.name in ("one", "axis_1"):
            model.graph.initializer.remove(item)
            model.graph.node.insert(0, helper.make_node("Constant", [], [item.name], value=item))


def last_axis(model: onnx.ModelProto) -> None:
    item = next(item for item in model.graph.initializer if item.name == "axis_1")
    item.CopyFrom(helper.make_tensor("axis_1", TensorProto.INT64, [1], [-1]))


@pytest.mark.parametrize("change", [cast_first, cast_before_sum, constant_nodes, last_axis])
def test_other_forms_of_the_arithmetic(change: Callable[[onnx.ModelProto], None], tmp_path: Path) -> None:
    model = tiny_model()
    change(model)
    expected = stock_ort.run(write_model_dir(tmp_path / "m", model, lambda name: None) / "model.onnx", [[1, 2, 3]])
    result = lifted(model)
    assert not any(item.name.startswith("mask/") for item in result.graph.node)
    found = stock_ort.run(write_model_dir(tmp_path / "out", result, lambda name: None) / "model.onnx", [[1, 2, 3]])
    np.testing.assert_array_equal(found["logits"], expected["logits"])


def test_constants_in_the_data_file_are_read_even_from_a_hub_cache(tmp_path: Path) -> None:
    outside = write_model_dir(tmp_path / "outside", place=lambda name: "model.onnx.data")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in outside.iterdir():
        (linked / file.name).symlink_to(file)
    report = patch_model(linked, tmp_path / "out", "head-major", lift_sequence_lengths=True)
    assert report.passes[1].changes
    assert "attention_mask" not in ports(onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False))


def test_functions_get_the_inputs_through_their_calls() -> None:
    model = in_function()
    del model.graph.input[1:3]
    model.graph.input.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["b", "t"]))
    arithmetic = tiny_model()
    model.graph.initializer.extend(item for item in arithmetic.graph.initializer if item.name in ("one", "axis_1"))
    nodes = [item for item in arithmetic.graph.node if item.name.startswith("mask/")] + list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    result = lifted(model)
    assert list(node(result, "call.1").input[3:]) == ["seqlens_k", "total_sequence_length"]
    assert "attention_mask" not in ports(result)


def spy_on(value: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node.append(helper.make_node("Abs", [value], ["seen"], "spy"))

    return change


def mask_is_output(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("mask_sum", TensorProto.INT64, ["batch"]))


def read_in_branch(model: onnx.ModelProto) -> None:
    inner = helper.make_node("Abs", ["attention_mask"], ["seen"], "spy")
    branch = helper.make_graph([inner], "b", [], [helper.make_tensor_value_info("seen", TensorProto.INT64, None)])
    flag = helper.make_node("Constant", [], ["flag"], value=helper.make_tensor("f", TensorProto.BOOL, [], [True]))
    choose = helper.make_node("If", ["flag"], ["chosen"], "choose", then_branch=branch, else_branch=branch)
    model.graph.node.extend([flag, choose])


def other_axis(model: onnx.ModelProto) -> None:
    item = next(item for item in model.graph.initializer if item.name == "axis_1")
    item.CopyFrom(helper.make_tensor("axis_1", TensorProto.INT64, [], [0]))


def subtract_two(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("two", TensorProto.INT64, [1], [2]))
    node(model, "mask/Sub").input[1] = "two"


def axis_is_an_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("axis_1", TensorProto.INT64, []))


def own_lengths(model: onnx.ModelProto) -> None:
    node(model, "mask/Cast").input[0] = "sequence_counts"
    model.graph.node.insert(0, helper.make_node("Size", ["input_ids"], ["sequence_counts"], "count"))


def second_mask(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("other_mask", TensorProto.INT64, ["b", "t"]))
    node(model, "mask/Shape").input[0] = "other_mask"


def computed_mask(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Abs", ["attention_mask"], ["positive"], "positive"))
    node(model, "mask/ReduceSum").input[0] = node(model, "mask/Shape").input[0] = "positive"


def taken_name(model: onnx.ModelProto) -> None:
    node(model, "layer.0/qkv_proj").output[0] = node(model, "layer.0/attention").input[0] = "seqlens_k"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (spy_on("attention_mask"), "node 'spy' (Abs) reads 'attention_mask'"),
        (spy_on("mask_sum"), "node 'spy' (Abs) reads 'mask_sum'"),
        (spy_on("mask_slots"), "node 'spy' (Abs) reads 'mask_slots'"),  # how long-context rotary tables are chosen
        (spy_on("lengths"), "node 'spy' (Abs) reads 'lengths'"),
        (read_in_branch, "node 'choose/spy' (Abs) reads 'attention_mask'"),
        (mask_is_output, "'mask_sum', which comes of 'attention_mask', is an output of the model"),
        (other_axis, "node 'layer.0/attention' has its total_sequence_length from Cast 'mask/TotalCast'"),
        (subtract_two, "node 'layer.0/attention' has its seqlens_k from Cast 'mask/Cast'"),
        (axis_is_an_input, "its lengths are not computed from one attention mask in a known way"),
        (own_lengths, "its lengths are not computed from one attention mask in a known way"),
        (second_mask, "its lengths are not computed from one attention mask in a known way"),
        (computed_mask, "its lengths are not computed from one attention mask in a known way"),
        (taken_name, "it already has a value called 'seqlens_k'"),
    ],
)
def test_refusals_name_the_consumer_and_change_nothing(change: Callable[[onnx.ModelProto], None], reason: str) -> None:
    model = tiny_model()
    change(model)
    graph = ir.from_proto(model)
    before = ir.to_proto(graph).SerializeToString()
    with pytest.raises(PatchRefusedError) as caught:
        LiftSequenceLengths()(graph)
    assert any(reason in item for item in caught.value.reasons), caught.value.reasons
    assert ir.to_proto(graph).SerializeToString() == before


@pytest.mark.parametrize("config", MODELS, ids=lambda file: file.parent.name)
def test_exported_models_give_the_same_outputs_in_stock_onnxruntime(config: Path, tmp_path: Path) -> None:
    patch_model(config.parent, tmp_path / "plain", "head-major")
    patch_model(config.parent, tmp_path / "lifted", "head-major", lift_sequence_lengths=True)
    tokens = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    expected = stock_ort.run(tmp_path / "plain" / "model.onnx", tokens)
    found = stock_ort.run(tmp_path / "lifted" / "model.onnx", tokens)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
