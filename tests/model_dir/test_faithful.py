from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper

from onnx_kv.errors import ModelDirError
from onnx_kv.model_dir import ModelDir
from onnx_kv.model_dir.faithful import check_faithful
from onnx_kv.patching import patch_model
from tests.support.tiny_model import initializer, node, tiny_model, write_model_dir

SHIPPED = sorted(Path(__file__).parents[2].glob("models/*/genai_config.json"))


def patched(tmp_path: Path, model: onnx.ModelProto, layout: str = "seq-major") -> onnx.ModelProto:
    patch_model(write_model_dir(tmp_path / "m", model), tmp_path / "out", layout)
    return onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)


def test_all_that_a_model_says_of_itself_is_kept(tmp_path: Path) -> None:
    model = tiny_model()
    model.domain, model.model_version, model.doc_string, model.producer_version = "org.example", 7, "what it is", "1.2"
    model.opset_import.add(domain="com.example", version=3)
    helper.set_model_props(model, {"author": "somebody", "z": "1", "a": ""})
    attention = node(model, "layer.0/attention")
    attention.attribute.extend(
        [
            helper.make_attribute("unknown_floats", [1.5, math.inf]),
            helper.make_attribute("not_text", b"\xff\x00"),
            helper.make_attribute("zero", 0),
        ]
    )
    attention.doc_string = "first"
    attention.metadata_props.add(key="origin", value="layer 0")
    result = patched(tmp_path, model)
    for field in ("domain", "model_version", "doc_string", "producer_name", "producer_version", "ir_version"):
        assert getattr(result, field) == getattr(model, field)
    assert {item.domain: item.version for item in result.opset_import} == {"": 21, "com.microsoft": 1, "com.example": 3}
    props = {item.key: item.value for item in result.metadata_props}
    assert props == {"author": "somebody", "z": "1", "a": "", "onnx_kv.passes": "stamp_kv_layout"}
    again = node(result, "layer.0/attention")
    assert [item for item in again.attribute if item.name != "kv_layout"] == list(attention.attribute)
    assert (again.doc_string, again.metadata_props) == (attention.doc_string, attention.metadata_props)
    assert [item.name for item in result.graph.node] == [item.name for item in model.graph.node]


def test_entries_of_external_tensors_that_nobody_knows_are_kept(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m")
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    initializer(model, "head").external_data.add(key="checksum", value="0123")
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    patch_model(directory, tmp_path / "out", "seq-major")
    result = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    assert initializer(result, "head") == initializer(model, "head")


def add_sparse(model: onnx.ModelProto) -> None:
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("sparse_indices", TensorProto.INT64, [1], [2])
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=values, indices=indices, dims=[4]))


def add_training(model: onnx.ModelProto) -> None:
    model.training_info.add().initialization.name = "start"


def add_unknown_field(model: onnx.ModelProto) -> None:
    data = model.graph.node[0].SerializeToString() + bytes([0xF8, 0x07, 0x2A])  # field 127 = 42
    model.graph.node[0].ParseFromString(data)


def add_untyped_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(AttributeProto(name="old", i=3))


def add_unnamed_initializer(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("", TensorProto.FLOAT, [1], [1.0]))


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (add_sparse, "graph.sparse_initializer"),
        (add_training, "training_info"),
        (add_unknown_field, "graph.node[mask/ReduceSum]: a field that this version of onnx does not know"),
        (add_untyped_attribute, "cannot be written again"),
        (add_unnamed_initializer, "graph.initializer"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None], lost: str
) -> None:
    model = tiny_model()
    change(model)
    with pytest.raises(ModelDirError) as caught:
        patched(tmp_path, model)
    assert lost in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_none_are_no_loss(tmp_path: Path) -> None:
    model = tiny_model()
    model.graph.node[0].attribute.append(helper.make_attribute("odd", float("nan")))
    model.graph.node[0].attribute.append(helper.make_attribute("odd_list", [float("nan"), -0.0]))
    model.graph.initializer.append(helper.make_tensor("nan", TensorProto.FLOAT, [1], [float("nan")]))
    patched(tmp_path, model)


@pytest.mark.parametrize("config", SHIPPED, ids=lambda file: file.parent.name)
def test_exported_models_are_written_again_byte_for_byte(config: Path) -> None:
    from onnx_kv.model_dir.faithful import model_bytes

    model_dir = ModelDir.open(config.parent)
    proto = model_dir.read_proto()
    model = model_dir.build_graph(proto)
    check_faithful(model_dir, proto, model)
    assert model_bytes(model, proto) == model_dir.model_file.read_bytes()
