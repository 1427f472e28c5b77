from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnx_kv.errors import PatchRefusedError
from onnx_kv.passes import LastTokenLogits, applied_passes
from onnx_kv.patching import patch_model
from tests.support import stock_ort
from tests.support.tiny_model import (
    VOCABULARY,
    WIDTH,
    contents,
    initializer,
    node,
    port,
    tensor,
    tiny_model,
    write_model_dir,
)

MODELS = sorted(Path(__file__).parents[2].glob("models/*/genai_config.json"))


def logits_shape(model: onnx.ModelProto) -> list[int | str]:
    shape = next(item for item in model.graph.output if item.name == "logits").type.tensor_type.shape
    return [dim.dim_param or dim.dim_value for dim in shape.dim]


def rename_logits(model: onnx.ModelProto, *nodes: onnx.NodeProto) -> None:
    """Put nodes between the head's product, now called `product`, and `logits`."""
    node(model, "lm_head").output[0] = "product"
    model.graph.node.extend(nodes)


def plain(model: onnx.ModelProto) -> None: ...


def softcap_and_cast(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("cap", TensorProto.FLOAT, [], [0.5]))
    rename_logits(
        model,
        helper.make_node("Div", ["product", "cap"], ["capped"], "cap/Div"),
        helper.make_node("Tanh", ["capped"], ["bent"], "cap/Tanh"),
        helper.make_node("Mul", ["cap", "bent"], ["scaled"], "cap/Mul"),
        helper.make_node("Cast", ["scaled"], ["logits"], "Cast", to=TensorProto.FLOAT),
    )


def bias_and_mask(model: onnx.ModelProto) -> None:
    mask = helper.make_tensor("mask", TensorProto.BOOL, [1, 1, VOCABULARY], [i % 3 == 0 for i in range(VOCABULARY)])
    lowest = helper.make_tensor("lowest", TensorProto.FLOAT, [], [-1e4])
    model.graph.initializer.extend([tensor("bias", VOCABULARY), mask, lowest])
    rename_logits(
        model,
        helper.make_node("Add", ["bias", "product"], ["biased"], "bias"),
        helper.make_node("Where", ["mask", "lowest", "biased"], ["logits"], "mask"),
    )


def computed_weight(model: onnx.ModelProto) -> None:
    """A tied head: the embedding, transposed in the graph."""
    model.graph.node.insert(0, helper.make_node("Transpose", ["embedding"], ["head_again"], "transpose"))
    node(model, "lm_head").input[1] = "head_again"


def norm_before(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor("norm", WIDTH))
    norm = helper.make_node("SimplifiedLayerNormalization", ["hidden.2", "norm"], ["normed"], "norm", axis=-1)
    model.graph.node.insert(len(model.graph.node) - 1, norm)
    model.graph.value_info.append(port("normed", TensorProto.FLOAT, "batch", "sequence", WIDTH))
    node(model, "lm_head").input[0] = "normed"


@pytest.mark.parametrize("change", [plain, softcap_and_cast, bias_and_mask, computed_weight, norm_before])
def test_only_the_last_position_is_left_and_can_be_brought_back(
    change: Callable[[onnx.ModelProto], None], tmp_path: Path
) -> None:
    model = tiny_model()
    change(model)
    source = write_model_dir(tmp_path / "m", model)
    patch_model(source, tmp_path / "last", "head-major", last_token_logits=True)
    patch_model(tmp_path / "last", tmp_path / "back", "head-major", last_token_logits=False)
    patch_model(source, tmp_path / "normal", "head-major", last_token_logits=False)
    assert contents(tmp_path / "normal") == contents(source)
    result = onnx.load(tmp_path / "last" / "model.onnx", load_external_data=False)
    assert logits_shape(result) == ["batch", 1, VOCABULARY]
    back = onnx.load(tmp_path / "back" / "model.onnx", load_external_data=False)
    assert back == ir.to_proto(ir.from_proto(onnx.load(source / "model.onnx", load_external_data=False)))
    tokens = [[3, 1, 4], [1, 5, 9]]
    expected = stock_ort.run(source / "model.onnx", tokens)
    found = stock_ort.run(tmp_path / "last" / "model.onnx", tokens)
    np.testing.assert_allclose(found["logits"], expected["logits"][:, -1:], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["present.1.value"], expected["present.1.value"])


def test_a_second_run_changes_nothing() -> None:
    graph = ir.from_proto(tiny_model())
    assert LastTokenLogits("logits")(graph).modified
    assert applied_passes(graph) == ("last_token_logits",)
    before = ir.to_proto(graph).SerializeToString()
    again = LastTokenLogits("logits")(graph)
    assert (again.modified, again.outcome.notes) == (False, ("the LM head reads the last position only",))
    assert ir.to_proto(graph).SerializeToString() == before
    LastTokenLogits("logits", undo=True)(graph)
    assert applied_passes(graph) == ()


def test_undoing_declares_positions_as_unknown_where_the_hidden_state_says_nothing() -> None:
    model = tiny_model()
    del model.graph.value_info[-1]
    graph = ir.from_proto(model)
    LastTokenLogits("logits")(graph)
    assert logits_shape(ir.to_proto(graph)) == ["batch", 1, VOCABULARY]
    LastTokenLogits("logits", undo=True)(graph)
    assert logits_shape(ir.to_proto(graph)) == ["batch", 0, VOCABULARY]  # neither a number nor a name


def other_readers_of_hidden(model: onnx.ModelProto) -> None:
    model.graph.output.append(port("hidden.2", TensorProto.FLOAT, "batch", "sequence", WIDTH))


def test_hidden_states_that_are_read_elsewhere_keep_every_position() -> None:
    model = tiny_model()
    other_readers_of_hidden(model)
    graph = ir.from_proto(model)
    LastTokenLogits("logits")(graph)
    hidden = next(value for value in graph.graph.outputs if value.name == "hidden.2")
    assert str(hidden.shape) == "[batch,sequence,16]"


def pruned_by_the_exporter(model: onnx.ModelProto) -> None:
    """`prune_lm_head`: a scalar index, so the axis is lost and put back; logits declared with one position."""
    model.graph.initializer.append(helper.make_tensor("minus_one", TensorProto.INT64, [], [-1]))
    at = len(model.graph.node) - 1
    model.graph.node.insert(at, helper.make_node("Gather", ["hidden.2", "minus_one"], ["last"], "Gather", axis=1))
    model.graph.node.insert(at + 1, helper.make_node("Unsqueeze", ["last", "one"], ["one_row"], "Unsqueeze"))
    node(model, "lm_head").input[0] = "one_row"


def declared_with_one_position(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1


@pytest.mark.parametrize("change", [pruned_by_the_exporter, declared_with_one_position])
def test_what_the_exporter_has_pruned_is_left_alone(change: Callable[[onnx.ModelProto], None]) -> None:
    model = tiny_model()
    change(model)
    graph = ir.from_proto(model)
    assert not LastTokenLogits("logits")(graph).modified
    with pytest.raises(PatchRefusedError, match="export the model again"):
        LastTokenLogits("logits", undo=True)(graph)


def second_reader(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Softmax", ["logits"], ["probabilities"], "softmax"))


def second_reader_on_the_way(model: onnx.ModelProto) -> None:
    rename_logits(
        model,
        helper.make_node("Tanh", ["product"], ["logits"], "tanh"),
        helper.make_node("ArgMax", ["product"], ["best"], "argmax"),
    )


def product_is_an_output(model: onnx.ModelProto) -> None:
    rename_logits(model, helper.make_node("Tanh", ["product"], ["logits"], "tanh"))
    model.graph.output.append(port("product", TensorProto.FLOAT, "batch", "sequence", VOCABULARY))


def mixes_positions(model: onnx.ModelProto) -> None:
    rename_logits(model, helper.make_node("CumSum", ["product", "axis_1"], ["logits"], "cumsum"))


def bias_by_position(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor("bias", 5, VOCABULARY))
    rename_logits(model, helper.make_node("Add", ["product", "bias"], ["logits"], "bias"))


def two_summands(model: onnx.ModelProto) -> None:
    """A low-rank adapter beside the head."""
    extra = helper.make_node("MatMul", ["hidden.1", "head"], ["adapter"], "adapter")
    rename_logits(model, extra, helper.make_node("Add", ["product", "adapter"], ["logits"], "sum"))


def weight_first(model: onnx.ModelProto) -> None:
    head = node(model, "lm_head")
    head.input[0], head.input[1] = "head", "hidden.2"


def unknown_head(model: onnx.ModelProto) -> None:
    node(model, "lm_head").op_type = "MatMulInteger"


def flat_hidden(model: onnx.ModelProto) -> None:
    hidden = next(item for item in model.graph.value_info if item.name == "hidden.2")
    del hidden.type.tensor_type.shape.dim[1]


def flat_logits(model: onnx.ModelProto) -> None:
    del model.graph.output[0].type.tensor_type.shape.dim[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flat_logits, "output 'logits' is not declared as [batch, sequence, vocabulary]"),
        (second_reader, "node 'softmax' (Softmax) reads 'logits', the logits of all positions"),
        (second_reader_on_the_way, "node 'argmax' (ArgMax) reads 'product'"),
        (product_is_an_output, "'product', the logits of all positions, is an output of the model"),
        (mixes_positions, "'logits', from which the logits are made, comes from CumSum 'cumsum'"),
        (bias_by_position, "comes from Add 'bias', which is no known LM head"),
        (two_summands, "comes from Add 'sum', which is no known LM head"),
        (weight_first, "comes from MatMul 'lm_head', which is no known LM head"),
        (unknown_head, "comes from MatMulInteger 'lm_head'"),
        (flat_hidden, "comes from MatMul 'lm_head', which is no known LM head"),
    ],
)
def test_refusals_name_the_node_and_change_nothing(change: Callable[[onnx.ModelProto], None], reason: str) -> None:
    model = tiny_model()
    change(model)
    graph = ir.from_proto(model)
    before = ir.to_proto(graph).SerializeToString()
    with pytest.raises(PatchRefusedError) as caught:
        LastTokenLogits("logits")(graph)
    assert any(reason in item for item in caught.value.reasons), caught.value.reasons
    assert ir.to_proto(graph).SerializeToString() == before


def test_the_output_must_exist() -> None:
    with pytest.raises(PatchRefusedError, match="it has no output 'scores'"):
        LastTokenLogits("scores")(ir.from_proto(tiny_model()))


@pytest.mark.parametrize("config", MODELS, ids=lambda file: file.parent.name)
def test_exported_models_keep_their_last_logits_in_stock_onnxruntime(config: Path, tmp_path: Path) -> None:
    patch_model(config.parent, tmp_path / "all", "head-major")
    patch_model(config.parent, tmp_path / "last", "head-major", last_token_logits=True)
    patch_model(tmp_path / "last", tmp_path / "back", "head-major", last_token_logits=False)
    assert contents(tmp_path / "back") == contents(tmp_path / "all")
    tokens = [[3, 1, 4, 1, 5]]
    expected = stock_ort.run(tmp_path / "all" / "model.onnx", tokens)["logits"]
    found = stock_ort.run(tmp_path / "last" / "model.onnx", tokens)["logits"]
    assert found.shape == (1, 1, expected.shape[2])
    tolerance = (2e-2 if found.dtype == np.float16 else 1e-4) * np.abs(expected).max()
    np.testing.assert_allclose(found, expected[:, -1:], atol=tolerance, rtol=0)


def test_the_weights_of_the_head_are_untouched(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    patch_model(source, tmp_path / "out", "seq-major", last_token_logits=True)
    result = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    before = onnx.load(source / "model.onnx", load_external_data=False)
    assert initializer(result, "head") == initializer(before, "head")
