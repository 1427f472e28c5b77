"""Configs that cannot be described are refused: the message names the key and the reason."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from onnx_kv.errors import MetadataError
from onnx_kv.metadata import generate_metadata, write_metadata
from tests.support import decoder

REMOVE = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """A plain config with the key at `path` set, or taken out."""
    config = decoder.config()
    block: Any = config
    *parents, last = path.split(".")
    for key in parents:
        block = block.setdefault(key, {})
    if value is REMOVE:
        del block[last]
    else:
        block[last] = value
    return config


def refusal(directory) -> str:
    with pytest.raises(MetadataError) as caught:
        write_metadata(directory)
    assert not (directory / "inference_metadata.yaml").exists()
    assert str(directory / "genai_config.json") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("model", "the top level"),
        ("model.decoder", "model"),
        ("model.context_length", "model"),
        ("model.decoder.num_hidden_layers", "model.decoder"),
        ("model.decoder.inputs.input_ids", "model.decoder.inputs"),
        ("model.decoder.inputs.attention_mask", "model.decoder.inputs"),
        ("model.decoder.inputs.past_key_names", "model.decoder.inputs"),
        ("model.decoder.inputs.past_value_names", "model.decoder.inputs"),
        ("model.decoder.outputs.logits", "model.decoder.outputs"),
        ("model.decoder.outputs.present_key_names", "model.decoder.outputs"),
        ("model.decoder.outputs.present_value_names", "model.decoder.outputs"),
    ],
)
def test_a_missing_key_is_named_with_its_place(tmp_path, path, where):
    message = refusal(decoder.write(tmp_path, changed(path, REMOVE)))
    assert f"missing key {path.rpartition('.')[2]!r} in {where}" in message


@pytest.mark.parametrize("value", ["", {}, None])
def test_an_empty_key_declares_nothing(tmp_path, value):
    key = "model.decoder" if value != "" else "model.decoder.inputs.input_ids"
    assert "missing key" in refusal(decoder.write(tmp_path, changed(key, value)))


@pytest.mark.parametrize(
    "value",
    [True, False, 0, -1, 8192.0, 1e3, "8192", None, [], {}, 2**31, 10**400, float(2**70)],
    ids=lambda value: str(value)[:12],
)
@pytest.mark.parametrize("path", ["model.context_length", "model.decoder.num_hidden_layers"])
def test_counts_are_positive_integers(tmp_path, path, value):
    assert path in refusal(decoder.write(tmp_path, changed(path, value)))


def test_a_number_of_layers_that_would_fill_the_memory(tmp_path):
    assert "num_hidden_layers" in refusal(decoder.write(tmp_path, changed("model.decoder.num_hidden_layers", 10**9)))


@pytest.mark.parametrize("value", [1, None, True, [], {}, ["input_ids"]])
@pytest.mark.parametrize("key", ["inputs.input_ids", "inputs.past_key_names", "outputs.logits"])
def test_names_are_strings(tmp_path, key, value):
    message = refusal(decoder.write(tmp_path, changed(f"model.decoder.{key}", value)))
    assert f"model.decoder.{key}" in message


@pytest.mark.parametrize("value", [[], "x", 3, True])
@pytest.mark.parametrize("key", ["model", "model.decoder", "model.decoder.inputs", "model.decoder.outputs"])
def test_blocks_are_objects(tmp_path, key, value):
    assert key in refusal(decoder.write(tmp_path, changed(key, value)))


@pytest.mark.parametrize("template", ["past.key", "past.%s.key", "%d.%d", "past.%d.%%", "past.%02d.key", "%", "{}"])
@pytest.mark.parametrize("key", ["inputs.past_key_names", "outputs.present_value_names"])
def test_templates_have_one_placeholder(tmp_path, key, template):
    message = refusal(decoder.write(tmp_path, changed(f"model.decoder.{key}", template)))
    assert f"model.decoder.{key}" in message
    assert "%d" in message


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("model.decoder.inputs.past_names", "past_%d", "share one port"),
        ("model.decoder.outputs.present_names", "present_%d", "share one port"),
        ("model.decoder.inputs.inputs_embeds", "inputs_embeds", "embeddings"),
        ("model.decoder.inputs.cross_past_key_names", "past_key_cross_%d", "encoder-decoder"),
        ("model.decoder.inputs.encoder_hidden_states", "encoder_hidden_states", "encoder-decoder"),
        ("model.encoder", {"filename": "encoder.onnx"}, "encoder-decoder"),
        ("model.decoder.inputs.rnn_states_prev", "rnn_states_prev", "recurrent"),
        ("model.decoder.inputs.past_conv_names", "past.%d.conv", "convolution"),
        ("model.decoder.inputs.past_recurrent_names", "past.%d.recurrent", "recurrent"),
        ("model.decoder.pipeline", [{"embed": {"filename": "a.onnx"}}], "pipeline"),
        ("model.decoder.inputs.block_table", "block_table", "paged"),
        ("model.decoder.state_groups", [{"kind": "paged_kv", "layer_ids": [0]}], "paged"),
        ("engine.dynamic_batching", {"block_size": 256}, "paged"),
        ("model.decoder.inputs.past_key_scale_names", "past.%d.scale", "quantised"),
        ("model.decoder.inputs.hidden_states", "hidden_states", "drafter"),
        ("model.decoder.inputs.total_sequence_length", "total", "no field"),
    ],
)
@pytest.mark.parametrize("beside_a_graph", [False, True])
def test_other_kinds_of_model(tmp_path, path, value, reason, beside_a_graph):
    directory = decoder.write(tmp_path, changed(path, value), decoder.graph() if beside_a_graph else None)
    message = refusal(directory)
    assert path in message
    assert reason in message


@pytest.mark.parametrize("kind", ["conv", "linear_attention", "mamba", 7, None, ["full_attention"]])
def test_layers_of_another_kind_need_the_graph(tmp_path, kind):
    config = changed("model.decoder.layer_types", [kind, "full_attention"])
    message = refusal(decoder.write(tmp_path / "alone", config))
    assert "model.decoder.layer_types" in message
    assert "graph" in message
    assert len(generate_metadata(decoder.write(tmp_path / "graph", config, decoder.graph([1]))).layers) == 1


def test_every_reason_is_told_at_once(tmp_path):
    config = changed("model.decoder.inputs.past_names", "past_%d")
    config["model"]["encoder"] = {"filename": "encoder.onnx"}
    message = refusal(decoder.write(tmp_path, config))
    assert "past_names" in message
    assert "model.encoder" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"num_attention_heads": 3},
        {"sliding_window": {"window_size": 64, "layers": [0, 7]}},
    ],
)
def test_counts_that_contradict_each_other(tmp_path, changes):
    config = decoder.config(**changes)
    assert next(iter(changes)) in refusal(decoder.write(tmp_path / "alone", config))
    # The graph decides where it can.
    metadata = generate_metadata(decoder.write(tmp_path / "graph", config, decoder.graph()))
    assert any(next(iter(changes)) in warning for warning in metadata.warnings)


@pytest.mark.parametrize(
    "window", [[], "64", {"layers": [0]}, {"window_size": 0}, {"window_size": 64, "layers": 0}, {"window_size": 1.5}]
)
def test_a_window_that_cannot_be_read(tmp_path, window):
    assert "sliding_window" in refusal(decoder.write(tmp_path, decoder.config(sliding_window=window)))


@pytest.mark.parametrize("layer", [True, -1, "0", 0.0, None])
def test_a_window_on_no_layer(tmp_path, layer):
    config = decoder.config(sliding_window={"window_size": 64, "layers": [0, layer]})
    assert "sliding_window.layers" in refusal(decoder.write(tmp_path, config))


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "head_size"])
def test_full_needs_the_counts(tmp_path, key):
    directory = decoder.write(tmp_path, changed(f"model.decoder.{key}", REMOVE))
    assert generate_metadata(directory).attention is None
    with pytest.raises(MetadataError, match=f"missing key '{key}' in model.decoder"):
        generate_metadata(directory, full=True)


def test_one_port_under_two_keys(tmp_path):
    config = changed("model.decoder.inputs.past_value_names", "past_key_values.%d.key")
    assert "past_key_values.0.key" in refusal(decoder.write(tmp_path, config))
    config = changed("model.decoder.inputs.attention_mask", "input_ids")
    assert "input_ids" in refusal(decoder.write(tmp_path, config))


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other/model.onnx", "a/../../b.onnx", "C:\\model.onnx", "..\\m.onnx"]
)
def test_a_decoder_outside_the_directory(tmp_path, name):
    assert "model.decoder.filename" in refusal(decoder.write(tmp_path, decoder.config(filename=name)))


def test_names_that_no_graph_can_hold(tmp_path):
    text = json.dumps(changed("model.decoder.outputs.logits", "\ud800"))
    assert "surrogate" in refusal(decoder.write(tmp_path, text))


@pytest.mark.parametrize(
    "fragment",
    [
        {"search": {"max_length": 20}},
        {"decoder": {"inputs": {}}},
        {},
        {"model": {"decoder": {"filename": "model.onnx"}}},
    ],
)
def test_fragments(tmp_path, fragment):
    assert "missing key" in refusal(decoder.write(tmp_path, fragment))


def test_drafters_beside_a_decoder_are_left_out(tmp_path):
    block = {"filename": "mtp.onnx", "inputs": {"past_key_names": "mtp.%d.key", "input_ids": "mtp_ids"}}
    plain = generate_metadata(decoder.write(tmp_path / "plain", decoder.config(), decoder.graph()))
    for key in ("mtp", "draft"):
        directory = decoder.write(tmp_path / key, changed(f"model.{key}", copy.deepcopy(block)), decoder.graph())
        metadata = generate_metadata(directory)
        assert metadata == plain
        assert any(f"model.{key}" in warning for warning in metadata.warnings)


def test_speculation_that_needs_no_other_ports(tmp_path):
    config = changed("speculative", {"ngram_size": 3})
    assert generate_metadata(decoder.write(tmp_path, config, decoder.graph())).warnings == ()


@pytest.mark.parametrize("path", ["extra", "model.extra", "model.decoder.extra", "model.decoder.inputs.extra"])
def test_unknown_keys_are_warned_about(tmp_path, path):
    metadata = generate_metadata(decoder.write(tmp_path, changed(path, "x"), decoder.graph()))
    assert f"unknown key {path} is ignored" in metadata.warnings


def test_the_kind_of_model_is_not_judged_by_its_name(tmp_path):
    plain = generate_metadata(decoder.write(tmp_path / "whisper", decoder.config(), decoder.graph()))
    for name in ("whisper", "lfm2", "decoder-pipeline", "gpt2", None, 7):
        assert generate_metadata(decoder.write(tmp_path / "x", changed("model.type", name), decoder.graph())) == plain
