"""A decoder of a few kilobytes, built node by node as the exporter builds its own, that stock ONNX Runtime can run.

    input_ids → embedding → (packed QKV → GroupQueryAttention → projection → residual) × layers → LM head → logits

with the exporter's attention-mask arithmetic. Tests change the protobuf before they write it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 1, 8, 32
WIDTH = HEADS * HEAD_DIM
OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]


def tensor(name: str, *shape: int, seed: int = 0) -> TensorProto:
    """A float32 initializer, the same for the same name and seed."""
    generator = np.random.default_rng([seed, *name.encode()])
    return numpy_helper.from_array((generator.standard_normal(shape) / 4).astype(np.float32), name)


def port(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def cache_ports(layers: Sequence[int], kind: int = TensorProto.FLOAT) -> tuple[list, list]:
    """Past inputs and present outputs; the last axis is symbolic, as the exporter leaves it."""
    sides = [(layer, side) for layer in layers for side in ("key", "value")]
    past = [port(f"past.{i}.{side}", kind, "batch", KV_HEADS, "past_length", "dim") for i, side in sides]
    present = [port(f"present.{i}.{side}", kind, "batch", KV_HEADS, "total_length", "dim") for i, side in sides]
    return past, present


def mask_arithmetic() -> list[onnx.NodeProto]:
    return [
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["mask_sum"], "mask/ReduceSum", keepdims=0),
        helper.make_node("Sub", ["mask_sum", "one"], ["mask_less_one"], "mask/Sub"),
        helper.make_node("Cast", ["mask_less_one"], ["lengths"], "mask/Cast", to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask_shape"], "mask/Shape"),
        helper.make_node("Gather", ["mask_shape", "axis_1"], ["mask_slots"], "mask/Gather", axis=0),
        helper.make_node("Cast", ["mask_slots"], ["total"], "mask/TotalCast", to=TensorProto.INT32),
    ]


def attention_node(layer: int, query: str, output: str, **attributes: object) -> onnx.NodeProto:
    past = [f"past.{layer}.key", f"past.{layer}.value"]
    return helper.make_node(
        "GroupQueryAttention",
        [query, "", "", *past, "lengths", "total"],
        [output, f"present.{layer}.key", f"present.{layer}.value"],
        f"layer.{layer}/attention",
        domain="com.microsoft",
        **{"num_heads": HEADS, "kv_num_heads": KV_HEADS} | attributes,
    )


def layer_nodes(layer: int, **attributes: object) -> list[onnx.NodeProto]:
    name = f"layer.{layer}"
    return [
        helper.make_node("MatMul", [f"hidden.{layer}", f"{name}.qkv"], [f"{name}/qkv"], f"{name}/qkv_proj"),
        attention_node(layer, f"{name}/qkv", f"{name}/attended", **attributes),
        helper.make_node("MatMul", [f"{name}/attended", f"{name}.out"], [f"{name}/projected"], f"{name}/o_proj"),
        helper.make_node("Add", [f"hidden.{layer}", f"{name}/projected"], [f"hidden.{layer + 1}"], f"{name}/residual"),
    ]


def tiny_model(layers: int = 2, **attributes: object) -> onnx.ModelProto:
    """The whole decoder; `attributes` go to every attention node. All weights are inside."""
    past, present = cache_ports(range(layers))
    packed = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    weights = [tensor("embedding", VOCABULARY, WIDTH), tensor("head", WIDTH, VOCABULARY)]
    for layer in range(layers):
        weights += [tensor(f"layer.{layer}.qkv", WIDTH, packed), tensor(f"layer.{layer}.out", WIDTH, WIDTH)]
    constants = [
        numpy_helper.from_array(np.array([1], np.int64), "one"),
        numpy_helper.from_array(np.array(1, np.int64), "axis_1"),
    ]
    nodes = mask_arithmetic()
    nodes.append(helper.make_node("Gather", ["embedding", "input_ids"], ["hidden.0"], "embed"))
    for layer in range(layers):
        nodes += layer_nodes(layer, **attributes)
    nodes.append(helper.make_node("MatMul", [f"hidden.{layers}", "head"], ["logits"], "lm_head"))
    inner = [(f"layer.{i}/attended", WIDTH) for i in range(layers)] + [(f"hidden.{layers}", WIDTH)]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [
            port("input_ids", TensorProto.INT64, "batch", "sequence"),
            port("attention_mask", TensorProto.INT64, "batch", "total_length"),
            *past,
        ],
        [port("logits", TensorProto.FLOAT, "batch", "sequence", VOCABULARY), *present],
        [*constants, *weights],
        value_info=[port(name, TensorProto.FLOAT, "batch", "sequence", width) for name, width in inner],
    )
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10, producer_name="tiny_model")


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(item for item in model.graph.node if item.name == name)


def initializer(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(item for item in model.graph.initializer if item.name == name)


def move_out(item: TensorProto, location: str, offset: int | None = None, length: int | None = None) -> bytes:
    """Make a tensor external and return the bytes that it had."""
    data = numpy_helper.to_array(item).tobytes()
    for field in ("raw_data", "float_data", "int32_data", "int64_data"):
        item.ClearField(field)
    item.data_location = TensorProto.EXTERNAL
    del item.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            item.external_data.add(key=key, value=str(value))
    return data


def weights_outside(name: str) -> str | None:
    """The exporter's habit: weights in one data file, the constants that shapes depend on inside."""
    return None if name in ("one", "axis_1") else "model.onnx.data"


def write_model_dir(
    path: Path,
    model: onnx.ModelProto | None = None,
    place: Callable[[str], str | None] = weights_outside,
    filename: str = "model.onnx",
) -> Path:
    """Write a model directory with config and side files.

    `place` says in which data file, relative to the ONNX file, the weight of a name is kept, None for inside.
    """
    model = tiny_model() if model is None else model
    (path / filename).parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, bytearray] = {}
    for item in model.graph.initializer:
        location = place(item.name)
        if location is not None and not item.external_data:
            file = data.setdefault(location, bytearray())
            file += move_out(item, location, len(file), numpy_helper.to_array(item).nbytes)
    for location, content in data.items():
        file_path = (path / filename).parent / location
        file_path.parent.mkdir(parents=True, exist_ok=True)
        file_path.write_bytes(content)
    (path / filename).write_bytes(model.SerializeToString())
    config = {"model": {"context_length": 64, "decoder": {"filename": filename}}}
    (path / "genai_config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_bytes(b'{"no": "tokenizer"}\r\n')
    return path


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a directory, by its relative path."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def leftovers(path: Path) -> list[str]:
    """Names in a directory that only an interrupted run would leave."""
    return sorted(entry.name for entry in path.iterdir() if "onnx-kv" in entry.name)
