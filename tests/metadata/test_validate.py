"""An existing file against its graph: the graph wins."""

from __future__ import annotations

import dataclasses

import onnx
import pytest
from onnx import TensorProto, helper

from onnx_kv.errors import MetadataError
from onnx_kv.layout import KvLayout
from onnx_kv.metadata import generate_metadata, validate_metadata
from tests.support import decoder


@pytest.fixture
def model(tmp_path):
    directory = decoder.write(tmp_path, decoder.config(), decoder.graph())
    write(directory)
    return directory


def write(directory, **changes):
    metadata = dataclasses.replace(generate_metadata(directory, full=True), **changes)
    (directory / "inference_metadata.yaml").write_text(metadata.to_yaml(), encoding="utf-8")


def fields(directory) -> list[str]:
    return [problem.field for problem in validate_metadata(directory).disagreements]


def test_generated_metadata_agrees(model):
    result = validate_metadata(model)
    assert result.agrees
    assert result.notes == ()
    assert (result.metadata_file.name, result.graph_file.name) == ("inference_metadata.yaml", "model.onnx")


KV = ("past_key_values.0.key", "past_key_values.0.value", "past_key_values.1.key", "past_key_values.1.value")
PRESENT = ("present.0.key", "present.0.value", "present.1.key", "present.1.value")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token_input": "tokens"}, "io.token_input"),
        ({"attention_mask_input": None}, "io"),
        ({"position_ids_input": "position_ids"}, "io.position_ids_input"),
        ({"logits_output": "scores"}, "io.logits_output"),
        ({"logits_output": "present.0.key"}, "io.logits_output"),
        ({"token_input": "attention_mask"}, "io.token_input"),
        ({"kv_inputs": (*KV[:3], "past_key_values.9.value")}, "io.kv_inputs[3]"),
        ({"kv_inputs": (KV[0], KV[0], *KV[2:])}, "io.kv_inputs[1]"),
        ({"kv_inputs": (KV[1], KV[0], *KV[2:])}, "io.kv_inputs"),
        ({"kv_inputs": (KV[0], KV[3], KV[2], KV[1])}, "io.kv_inputs[1]"),
        ({"kv_outputs": (PRESENT[2], PRESENT[1], PRESENT[0], PRESENT[3])}, "io.kv_outputs[0]"),
        ({"kv_outputs": (*PRESENT[:3], "logits")}, "io.kv_outputs[3]"),
        ({"kv_layout": KvLayout.SEQ_MAJOR}, "io.kv_layout"),
        ({"max_sequence_length": 4096}, "max_sequence_length"),
    ],
)
def test_each_difference_is_told_at_its_field(model, changes, expected):
    write(model, **changes)
    assert expected in fields(model)


def test_a_layer_that_is_left_out(model):
    attention = generate_metadata(model, full=True).attention
    shorter = {field.name: getattr(attention, field.name)[:1] for field in dataclasses.fields(attention)}
    write(model, kv_inputs=KV[:2], kv_outputs=PRESENT[:2], attention=dataclasses.replace(attention, **shorter))
    problems = validate_metadata(model).disagreements
    assert any("past_key_values.1.key" in problem.message for problem in problems)


@pytest.mark.parametrize(
    ("field", "value"), [("query_heads", (8, 4)), ("kv_heads", (2, 1)), ("head_sizes", (8, 16)), ("windows", (None, 7))]
)
def test_the_attention_block(model, field, value):
    attention = generate_metadata(model, full=True).attention
    write(model, attention=dataclasses.replace(attention, **{field: value}))
    assert len(fields(model)) == 1
    assert fields(model)[0].startswith("attention.")


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "what"),
    [
        ("present.0.key", ["b", 2, "s", 16], TensorProto.FLOAT, "head sizes"),
        ("present.1.value", ["b", 3, "s", 8], TensorProto.FLOAT, "head counts"),
        ("past_key_values.0.value", ["b", 2, "s", 8], TensorProto.FLOAT16, "element types"),
    ],
)
def test_ports_of_a_layer_that_do_not_fit(model, name, shape, dtype, what):
    graph = decoder.graph()
    for value in (*graph.graph.input, *graph.graph.output):
        if value.name == name:
            value.CopyFrom(helper.make_tensor_value_info(name, dtype, shape))
    onnx.save(graph, model / "model.onnx")
    messages = [problem.message for problem in validate_metadata(model).disagreements]
    assert any(what in message and repr(name) in message for message in messages)


def test_without_a_config_the_only_graph_is_taken(model):
    (model / "genai_config.json").unlink()
    assert validate_metadata(model).agrees
    (model / "model.onnx").rename(model / "other.onnx")
    assert validate_metadata(model).agrees


def test_what_cannot_be_compared(tmp_path, model):
    (model / "model.onnx").unlink()
    with pytest.raises(MetadataError, match=r"model\.onnx"):
        validate_metadata(model)
    (model / "inference_metadata.yaml").unlink()
    with pytest.raises(MetadataError, match=r"inference_metadata\.yaml"):
        validate_metadata(model)
    with pytest.raises(MetadataError):
        validate_metadata(tmp_path / "nowhere")


def test_a_graph_whose_attention_cannot_be_read_is_compared_by_its_ports(model):
    graph = decoder.graph()
    for node in graph.graph.node:
        if node.op_type == "GroupQueryAttention":
            del node.attribute[:]
    onnx.save(graph, model / "model.onnx")
    result = validate_metadata(model)
    assert result.agrees
    assert any("not checked" in note for note in result.notes)
    write(model, token_input="tokens")
    assert not validate_metadata(model).agrees
