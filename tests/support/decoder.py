"""A small decoder for tests of what stands around a graph: a config as exporters write it, a graph with its ports.

The graph is well-formed and its attention nodes are real, but it has no weights and computes nothing of use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 4, 2, 8, 16


def config(layers: int = 2, **decoder: Any) -> dict[str, Any]:
    """A `genai_config.json` with the keys that matter; `decoder` adds to or replaces keys of its block."""
    return {
        "model": {
            "context_length": 8192,
            "decoder": {
                "filename": "model.onnx",
                "head_size": HEAD_SIZE,
                "hidden_size": HEADS * HEAD_SIZE,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": HEADS,
                "num_hidden_layers": layers,
                "num_key_value_heads": KV_HEADS,
            }
            | decoder,
            "type": "llama",
            "vocab_size": VOCABULARY,
        },
        "search": {"max_length": 8192},
    }


def graph(
    layers: Iterable[int] = (0, 1),
    *,
    past: Sequence[str] = ("past_key_values.{}.key", "past_key_values.{}.value"),
    present: Sequence[str] = ("present.{}.key", "present.{}.value"),
    input_ids: str = "input_ids",
    attention_mask: str | None = "attention_mask",
    logits: str = "logits",
    extra_inputs: Sequence[onnx.ValueInfoProto] = (),
    unread_inputs: Sequence[onnx.ValueInfoProto] = (),
    dtype: int = TensorProto.FLOAT,
    attributes: dict[str, Any] | None = None,
    cache_shape: Sequence[int | str] = ("batch", KV_HEADS, "capacity", HEAD_SIZE),
) -> onnx.ModelProto:
    """A decoder whose cached layers are `layers`; `{}` in a name stands for the layer's index.

    `extra_inputs` are read by a node of their own, `unread_inputs` by none. `attributes` are added to every attention
    node. Without an attention mask, the lengths are inputs `seqlens_k` and `total_sequence_length`.
    """
    width = HEADS * HEAD_SIZE
    inputs = [helper.make_tensor_value_info(input_ids, TensorProto.INT64, ["batch", "sequence"])]
    outputs = [helper.make_tensor_value_info(logits, dtype, ["batch", "sequence", width])]
    nodes = [
        helper.make_node("Cast", [input_ids], ["/tokens"], to=dtype),
        helper.make_node("Unsqueeze", ["/tokens", "/last"], ["/column"]),
        helper.make_node("Expand", ["/column", "/width"], ["/hidden"]),
        helper.make_node("Slice", ["/hidden", "/zero", "/kv_width", "/last"], ["/kv"]),
    ]
    if attention_mask is None:
        inputs.append(helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, ["batch"]))
        inputs.append(helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, [1]))
    else:
        inputs.append(helper.make_tensor_value_info(attention_mask, TensorProto.INT64, ["batch", "total"]))
        nodes += [
            helper.make_node("Cast", [attention_mask], ["/mask"], to=TensorProto.INT32),
            helper.make_node("ReduceMax", ["/mask"], ["seqlens_k"], keepdims=0, axes=[1]),
            helper.make_node("ReduceSum", ["/mask"], ["total_sequence_length"], keepdims=0),
        ]
    source = "/hidden"
    for layer in layers:
        ports = [name.format(layer) for name in (*past, *present)]
        inputs += [helper.make_tensor_value_info(name, dtype, cache_shape) for name in ports[:2]]
        outputs += [helper.make_tensor_value_info(name, dtype, cache_shape) for name in ports[2:]]
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [source, "/kv", "/kv", ports[0], ports[1], "seqlens_k", "total_sequence_length"],
                [f"/attention.{layer}", ports[2], ports[3]],
                name=f"layer.{layer}",
                domain="com.microsoft",
                **{"num_heads": HEADS, "kv_num_heads": KV_HEADS} | (attributes or {}),
            )
        )
        source = f"/attention.{layer}"
    nodes.append(helper.make_node("Identity", [source], [logits]))
    nodes += [helper.make_node("Identity", [extra.name], [f"/read.{extra.name}"]) for extra in extra_inputs]
    constants = {"/last": [-1], "/width": [1, 1, width], "/zero": [0], "/kv_width": [KV_HEADS * HEAD_SIZE]}
    initializers = [
        helper.make_tensor(name, TensorProto.INT64, [len(values)], values) for name, values in constants.items()
    ]
    body = helper.make_graph(
        nodes, "decoder", [*inputs, *extra_inputs, *unread_inputs], outputs, initializer=initializers
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(body, opset_imports=opsets, ir_version=8)


def write(directory: Path, config: object, graph: onnx.ModelProto | None = None) -> Path:
    """Write a model directory; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config, indent=4)
    (directory / "genai_config.json").write_text(text, encoding="utf-8")
    if graph is not None:
        onnx.save(graph, directory / "model.onnx")
    return directory
