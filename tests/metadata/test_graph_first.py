"""Where the graph stands beside the config it is asked first."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from onnx_kv.errors import MetadataError
from onnx_kv.metadata import generate_metadata
from tests.support import decoder

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def port(name, dtype=FLOAT, shape=("batch", 2, 4)):
    return helper.make_tensor_value_info(name, dtype, shape)


def refusal(directory) -> str:
    with pytest.raises(MetadataError) as caught:
        generate_metadata(directory)
    return str(caught.value)


def test_the_graphs_of_these_tests_are_well_formed():
    for graph in (decoder.graph(), decoder.graph([3], attention_mask=None, extra_inputs=[port("state")])):
        onnx.checker.check_model(graph)


@pytest.mark.parametrize("layers", [[0, 2], [3], [1, 5, 11]])
def test_only_layers_with_ports_are_listed(tmp_path, layers):
    metadata = generate_metadata(decoder.write(tmp_path, decoder.config(layers=12), decoder.graph(layers)))
    assert [layer.past_key for layer in metadata.layers] == [f"past_key_values.{i}.key" for i in layers]
    assert any("num_hidden_layers is 12" in warning for warning in metadata.warnings)


def test_more_layers_than_the_config_counts(tmp_path):
    metadata = generate_metadata(decoder.write(tmp_path, decoder.config(layers=1), decoder.graph(range(3))))
    assert len(metadata.layers) == 3
    assert any("num_hidden_layers is 1" in warning for warning in metadata.warnings)


def test_num_hidden_layers_is_not_needed_beside_a_graph(tmp_path):
    config = decoder.config()
    del config["model"]["decoder"]["num_hidden_layers"]
    assert len(generate_metadata(decoder.write(tmp_path, config, decoder.graph())).layers) == 2


def test_layers_are_in_order_of_their_index_not_of_the_ports(tmp_path):
    metadata = generate_metadata(decoder.write(tmp_path, decoder.config(layers=12), decoder.graph([10, 2, 0])))
    assert [layer.past_key for layer in metadata.layers] == [f"past_key_values.{i}.key" for i in (0, 2, 10)]


@pytest.mark.parametrize("index", ["00", "+1", "1e2", "a", "", "٣", "1.2", "-1", "12345678901234567890"])
def test_only_a_plain_number_is_a_layer(tmp_path, index):
    graph = decoder.graph([0], unread_inputs=[port(f"past_key_values.{index}.key")])
    metadata = generate_metadata(decoder.write(tmp_path, decoder.config(layers=1), graph))
    assert metadata.kv_inputs == ("past_key_values.0.key", "past_key_values.0.value")


def test_declared_names_win_over_decoys_with_the_usual_names(tmp_path):
    config = decoder.config(layers=1)
    config["model"]["decoder"]["inputs"] |= {
        "input_ids": "tokens",
        "past_key_names": "cache.%d.k",
        "past_value_names": "cache.%d.v",
    }
    config["model"]["decoder"]["outputs"] |= {"present_key_names": "new.%d.k", "present_value_names": "new.%d.v"}
    graph = decoder.graph(
        [0],
        input_ids="tokens",
        past=("cache.{}.k", "cache.{}.v"),
        present=("new.{}.k", "new.{}.v"),
        unread_inputs=[port("past_key_values.0.key"), port("past_key_values.0.value"), port("input_ids", INT64)],
    )
    metadata = generate_metadata(decoder.write(tmp_path, config, graph))
    assert metadata.token_input == "tokens"
    assert metadata.kv_inputs == ("cache.0.k", "cache.0.v")
    assert metadata.kv_outputs == ("new.0.k", "new.0.v")


def test_a_name_from_another_block_wins_over_a_default_decoy(tmp_path):
    config = decoder.config(layers=1)
    del config["model"]["decoder"]["inputs"]["input_ids"]
    config["model"]["embedding"] = {"inputs": {"input_ids": "tokens"}}
    graph = decoder.graph([0], input_ids="tokens", unread_inputs=[port("input_ids", INT64, ["batch", "sequence"])])
    metadata = generate_metadata(decoder.write(tmp_path, config, graph))
    assert metadata.token_input == "tokens"
    assert any("model.embedding.inputs.input_ids" in warning for warning in metadata.warnings)


def test_a_name_from_another_block_that_the_graph_lacks_is_no_name(tmp_path):
    config = decoder.config(layers=1)
    del config["model"]["decoder"]["inputs"]["input_ids"]
    config["model"]["embedding"] = {"filename": "embedding.onnx", "inputs": {"input_ids": "tokens"}}
    metadata = generate_metadata(decoder.write(tmp_path, config, decoder.graph([0])))
    assert metadata.token_input == "input_ids"


def test_two_other_blocks_with_different_names_are_refused(tmp_path):
    config = decoder.config(layers=1)
    del config["model"]["decoder"]["inputs"]["input_ids"]
    config["model"] |= {"embedding": {"inputs": {"input_ids": "a"}}, "vision": {"inputs": {"input_ids": "b"}}}
    graph = decoder.graph([0], input_ids="a", unread_inputs=[port("b", INT64)])
    message = refusal(decoder.write(tmp_path, config, graph))
    assert "model.embedding.inputs.input_ids 'a'" in message
    assert "model.vision.inputs.input_ids 'b'" in message


@pytest.mark.parametrize("block", ["inputs", "outputs"])
def test_defaults_count_where_the_graph_has_them(tmp_path, block):
    config = decoder.config()
    del config["model"]["decoder"][block]
    metadata = generate_metadata(decoder.write(tmp_path, config, decoder.graph()))
    assert metadata == generate_metadata(decoder.write(tmp_path / "b", decoder.config(), decoder.graph()))
    assert sum("ONNX Runtime GenAI's default" in warning for warning in metadata.warnings) >= 3


def test_a_default_that_the_graph_lacks_is_a_missing_key(tmp_path):
    config = decoder.config()
    del config["model"]["decoder"]["outputs"]["logits"]
    message = refusal(decoder.write(tmp_path, config, decoder.graph(logits="scores")))
    assert "missing key 'logits' in model.decoder.outputs" in message
    assert "'scores'" in message


def test_position_ids_are_not_taken_by_default(tmp_path):
    graph = decoder.graph(extra_inputs=[port("position_ids", INT64, ["batch", "sequence"])])
    assert "missing key 'position_ids' in model.decoder.inputs" in refusal(
        decoder.write(tmp_path, decoder.config(), graph)
    )


@pytest.mark.parametrize(
    ("block", "key", "name"),
    [
        ("inputs", "input_ids", "tokens"),
        ("inputs", "attention_mask", "mask"),
        ("inputs", "position_ids", "position_ids"),
        ("inputs", "past_value_names", "past.%d.v"),
        ("outputs", "logits", "scores"),
        ("outputs", "present_key_names", "now.%d.k"),
    ],
)
def test_a_declared_port_that_the_graph_lacks_is_an_error(tmp_path, block, key, name):
    config = decoder.config()
    config["model"]["decoder"][block][key] = name
    message = refusal(decoder.write(tmp_path, config, decoder.graph()))
    assert name.replace("%d", "0") in message
    assert "model.onnx" in message


def test_one_layer_without_its_value_port_is_an_error(tmp_path):
    graph = decoder.graph([0, 1])
    wrong = next(value for value in graph.graph.input if value.name == "past_key_values.1.value")
    wrong.name = "elsewhere"
    message = refusal(decoder.write(tmp_path, decoder.config(), graph))
    assert "'past_key_values.1.value'" in message
    assert "past_key_values.0" not in message


def test_no_cache_port_at_all_is_an_error(tmp_path):
    message = refusal(decoder.write(tmp_path, decoder.config(), decoder.graph([])))
    assert "'past_key_values.%d.key'" in message


@pytest.mark.parametrize("name", ["past.1.conv", "past.1.recurrent", "rnn_states_prev", "past_key_cross_0", "pixels"])
def test_state_that_nothing_describes_is_refused_by_port_name(tmp_path, name):
    graph = decoder.graph([0], extra_inputs=[port(name)])
    message = refusal(decoder.write(tmp_path, decoder.config(layers=2), graph))
    assert repr(name) in message
    assert "state" in message


def test_state_that_the_config_declares_is_refused_by_its_ports(tmp_path):
    config = decoder.config(layers=3, layer_types=["conv", "full_attention", "conv"])
    config["model"]["decoder"]["inputs"]["past_conv_names"] = "past.%d.conv"
    graph = decoder.graph([1], extra_inputs=[port("past.0.conv"), port("past.2.conv")])
    message = refusal(decoder.write(tmp_path, config, graph))
    assert "model.decoder.inputs.past_conv_names ('past.0.conv', 'past.2.conv')" in message


def test_an_input_that_nothing_reads_is_only_a_warning(tmp_path):
    graph = decoder.graph(unread_inputs=[port("leftover")])
    warnings = generate_metadata(decoder.write(tmp_path, decoder.config(), graph)).warnings
    assert any("'leftover'" in warning for warning in warnings)


def test_an_input_with_a_default_value_need_not_be_described(tmp_path):
    graph = decoder.graph(extra_inputs=[port("scale", FLOAT, [1])])
    graph.graph.initializer.append(helper.make_tensor("scale", FLOAT, [1], [1.0]))
    assert len(generate_metadata(decoder.write(tmp_path, decoder.config(), graph)).layers) == 2


def test_an_extra_output_is_only_a_warning(tmp_path):
    graph = decoder.graph()
    graph.graph.output.append(port("hidden", FLOAT, ["batch", "sequence", 32]))
    metadata = generate_metadata(decoder.write(tmp_path, decoder.config(), graph))
    assert any("'hidden'" in warning for warning in metadata.warnings)


def test_key_and_value_that_the_node_takes_the_other_way_round(tmp_path):
    config = decoder.config(layers=1)
    inputs = config["model"]["decoder"]["inputs"]
    inputs["past_key_names"], inputs["past_value_names"] = inputs["past_value_names"], inputs["past_key_names"]
    message = refusal(decoder.write(tmp_path, config, decoder.graph([0])))
    assert "'past_key_values.0.key'" in message
    assert "layer.0" in message


def test_past_and_present_of_different_layers(tmp_path):
    graph = decoder.graph([0, 1])
    present = {value.name: value for value in graph.graph.output}
    present["present.0.key"].name, present["present.1.key"].name = "present.1.key", "present.0.key"
    for node in graph.graph.node:
        node.output[:] = [
            {"present.0.key": "present.1.key", "present.1.key": "present.0.key"}.get(name, name) for name in node.output
        ]
    message = refusal(decoder.write(tmp_path, decoder.config(), graph))
    assert "io.kv_outputs[0]" in message


def test_nodes_of_several_layouts(tmp_path):
    graph = decoder.graph([0, 1])
    node = next(node for node in graph.graph.node if node.name == "layer.1")
    node.attribute.append(helper.make_attribute("kv_layout", 1))
    message = refusal(decoder.write(tmp_path, decoder.config(), graph))
    assert "layer.0" in message
    assert "layer.1" in message


def test_a_layout_that_is_none(tmp_path):
    message = refusal(decoder.write(tmp_path, decoder.config(), decoder.graph(attributes={"kv_layout": 9})))
    assert "9" in message


@pytest.mark.parametrize(
    ("shape", "what"),
    [(("batch", 2, 8), "3 axes"), (("batch", 2, "capacity", 8, 1), "5 axes")],
)
def test_a_cache_of_another_rank(tmp_path, shape, what):
    assert what in refusal(decoder.write(tmp_path, decoder.config(), decoder.graph(cache_shape=shape)))


def test_position_ids_with_three_rows_are_refused(tmp_path):
    config = decoder.config()
    config["model"]["decoder"]["inputs"]["position_ids"] = "position_ids"
    graph = decoder.graph(extra_inputs=[port("position_ids", INT64, [3, "batch", "sequence"])])
    assert "io.position_ids_input" in refusal(decoder.write(tmp_path, config, graph))


def test_tokens_that_are_not_integers(tmp_path):
    graph = decoder.graph()
    graph.graph.input[0].type.tensor_type.elem_type = FLOAT
    assert "io.token_input" in refusal(decoder.write(tmp_path, decoder.config(), graph))


def test_a_cache_that_is_no_tensor_of_vectors(tmp_path):
    graph = decoder.graph([0])
    cache = next(value for value in graph.graph.input if value.name == "past_key_values.0.key")
    tensor = helper.make_tensor_type_proto(FLOAT, ["batch", 2, "capacity", 8])
    for kind in (helper.make_sequence_type_proto(tensor), helper.make_tensor_type_proto(INT64, ["batch", 2, "s", 8])):
        cache.type.CopyFrom(kind)
        message = refusal(decoder.write(tmp_path, decoder.config(layers=1), graph))
        assert "io.kv_inputs[0]" in message


def test_functions_that_call_themselves_or_each_other_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("onnx_kv.graph.MAX_CALLS", 2000)

    def function(name, *callees):
        nodes = [helper.make_node(callee, ["x"], [f"y{i}"], domain="d") for i, callee in enumerate(callees)]
        nodes.append(helper.make_node("Identity", ["x"], ["y"]))
        opsets = [helper.make_opsetid("d", 1), helper.make_opsetid("", 17)]
        return helper.make_function("d", name, ["x"], ["y"], nodes, opsets)

    for functions, reason in (
        ([function("F", "F")], "calls itself"),
        ([function("F", "G"), function("G", "F")], "calls itself"),
        (
            [
                function("F", "F1", "F1"),
                *(function(f"F{i}", f"F{i + 1}", f"F{i + 1}") for i in range(1, 40)),
                function("F40"),
            ],
            "2,000",
        ),
    ):
        graph = decoder.graph()
        graph.functions.extend(functions)
        graph.opset_import.append(helper.make_opsetid("d", 1))
        graph.graph.node.append(helper.make_node("F", ["input_ids"], ["/called"], domain="d"))
        assert reason in refusal(decoder.write(tmp_path, decoder.config(), graph))


def test_two_ports_of_one_name(tmp_path):
    graph = decoder.graph()
    graph.graph.input.append(graph.graph.input[0])
    assert "input_ids" in refusal(decoder.write(tmp_path, decoder.config(), graph))


def test_counts_of_the_config_that_the_graph_overrules(tmp_path):
    directory = decoder.write(tmp_path, decoder.config(num_key_value_heads=4, head_size=99), decoder.graph())
    metadata = generate_metadata(directory, full=True)
    assert metadata.attention is not None
    assert (metadata.attention.kv_heads, metadata.attention.head_sizes) == ((2, 2), (8, 8))
    assert any("num_key_value_heads is 4" in warning for warning in metadata.warnings)
    assert any("head_size is 99" in warning for warning in metadata.warnings)


def test_a_mask_beside_lengths(tmp_path):
    graph = decoder.graph(attention_mask=None, extra_inputs=[port("attention_mask", INT64, ["batch", "total"])])
    metadata = generate_metadata(decoder.write(tmp_path, decoder.config(), graph))
    assert (metadata.attention_mask_input, metadata.seqlens_k_input) == ("attention_mask", "seqlens_k")


def test_a_graph_without_a_mask_that_nothing_declares(tmp_path):
    config = decoder.config()
    del config["model"]["decoder"]["inputs"]["attention_mask"]
    metadata = generate_metadata(decoder.write(tmp_path, config, decoder.graph(attention_mask=None)))
    assert metadata.attention_mask_input is None


def test_a_decoder_of_another_file_name(tmp_path):
    directory = decoder.write(tmp_path, decoder.config(filename="deep/decoder_q4.onnx"))
    (directory / "deep").mkdir()
    onnx.save(decoder.graph([1]), directory / "deep" / "decoder_q4.onnx")
    onnx.save(decoder.graph([0, 1]), directory / "model.onnx")
    assert len(generate_metadata(directory).layers) == 1


def test_ports_without_nodes_are_compared_as_well(tmp_path):
    graph = decoder.graph([0], extra_inputs=[port("past.1.conv")])
    del graph.graph.node[:]
    message = refusal(decoder.write(tmp_path, decoder.config(), graph))
    assert "'past.1.conv'" in message
