from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_kv.errors import ModelDirError
from onnx_kv.model_dir import ModelDir
from onnx_kv.model_dir.external_data import check_external_data, external_tensors
from onnx_kv.patching import patch_model
from tests.support.tiny_model import contents, initializer, move_out, tensor, tiny_model, write_model_dir


def check(directory: Path) -> frozenset[Path]:
    model_dir = ModelDir.open(directory)
    return check_external_data(model_dir, model_dir.read_proto())


def edited(directory: Path, name: str, **entries: object) -> Path:
    """Change the external-data entries of one tensor of a written model; None removes an entry."""
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    item = initializer(model, name)
    known = {entry.key: entry.value for entry in item.external_data} | {k: str(v) for k, v in entries.items()}
    del item.external_data[:]
    for key, value in known.items():
        if value != "None":
            item.external_data.add(key=key, value=value)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    return directory


def test_several_files_in_subfolders_beside_the_model(tmp_path: Path) -> None:
    places = {"head": "head.bin", "embedding": "parts/a/embedding.bin"}
    directory = write_model_dir(tmp_path / "m", place=lambda name: places.get(name), filename="onnx/decoder.onnx")
    assert check(directory) == {directory / "onnx" / "head.bin", directory / "onnx" / "parts" / "a" / "embedding.bin"}


def test_tied_weights_overlaps_any_order_and_missing_entries(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m")
    edited(directory, "layer.1.out", offset=0, length=None)  # the embedding's bytes, once more
    edited(directory, "layer.0.out", offset=128)  # overlaps it
    edited(directory, "layer.0.qkv", offset=None)
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    model.graph.initializer.sort(key=lambda item: item.name, reverse=True)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    assert check(directory) == {directory / "model.onnx.data"}


def test_tensors_are_found_wherever_they_are_nested() -> None:
    def outside(name: str) -> TensorProto:
        item = tensor(name, 2)
        move_out(item, f"{name}.bin")
        return item

    def constant(name: str) -> onnx.NodeProto:
        return helper.make_node("Constant", [], [name], value=outside(name))

    branch = helper.make_graph([constant("in_branch")], "b", [], [], [outside("branch_weight")])
    branches = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    function = helper.make_function("local", "F", [], ["z"], [constant("in_function")], [])
    many = helper.make_node("Custom", [], ["m"], tensors=[outside("listed")])
    sparse = onnx.SparseTensorProto(values=outside("sparse_values"), indices=outside("sparse_indices"), dims=[4])
    graph = helper.make_graph([branches, many], "g", [], [], [outside("weight")])
    graph.sparse_initializer.append(sparse)
    model = helper.make_model(graph, functions=[function])
    model.training_info.add().algorithm.initializer.append(outside("training"))
    found = {item.name for item in external_tensors(model)}
    assert found == {
        "in_branch", "branch_weight", "in_function", "listed", "sparse_values", "sparse_indices", "weight", "training"
    }  # fmt: skip


def test_external_data_in_branches_and_functions_goes_through_a_patch(tmp_path: Path) -> None:
    def outside(name: str) -> TensorProto:
        item = tensor(name, 16)
        move_out(item, f"nested/{name}.bin", 0)
        return item

    model = tiny_model()
    inner = helper.make_node("Add", ["branch_weight", "branch_weight"], ["chosen_inner"], "inner")
    output = helper.make_tensor_value_info("chosen_inner", TensorProto.FLOAT, [16])
    branch = helper.make_graph([inner], "branch", [], [output], [outside("branch_weight")])
    constant = helper.make_node("Constant", [], ["z"], "constant", value=outside("function_weight"))
    model.functions.append(helper.make_function("local", "F", [], ["z"], [constant], model.opset_import[:1]))
    model.opset_import.append(helper.make_opsetid("local", 1))
    flag = helper.make_tensor("flag", TensorProto.BOOL, [], [True])
    model.graph.node.extend(
        [
            helper.make_node("Constant", [], ["flag"], value=flag),
            helper.make_node("If", ["flag"], ["chosen"], "choose", then_branch=branch, else_branch=branch),
            helper.make_node("F", [], ["called"], "call", domain="local"),
        ]
    )
    directory = write_model_dir(tmp_path / "m", model)
    (directory / "nested").mkdir()
    for name in ("branch_weight", "function_weight"):
        (directory / "nested" / f"{name}.bin").write_bytes(name.encode() * 5)
    report = patch_model(directory, tmp_path / "out", "seq-major", link=True)
    before, after = contents(directory), contents(tmp_path / "out")
    assert [name for name in before if before[name] != after[name]] == ["model.onnx"]
    assert report.linked_bytes == sum(len(data) for name, data in before.items() if name.endswith((".bin", ".data")))
    result = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    source = onnx.load(directory / "model.onnx", load_external_data=False)
    assert list(external_tensors(result)) == list(external_tensors(source))
    (directory / "nested" / "function_weight.bin").unlink()
    with pytest.raises(ModelDirError, match="tensor 'function_weight'"):
        patch_model(directory, tmp_path / "other", "seq-major")


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"location": "/etc/passwd"}, "absolute"),
        ({"location": "C:\\data.bin"}, "absolute"),
        ({"location": "\\\\server\\share\\x"}, "absolute"),
        ({"location": "../model.onnx.data"}, "has '..'"),
        ({"location": "sub/../../m/model.onnx.data"}, "has '..'"),
        ({"location": "sub\\..\\..\\x"}, "has '..'"),
        ({"location": "a\0b"}, "no file name"),
        ({"location": None}, "empty"),
        ({"location": "missing.bin"}, "cannot be found"),
        ({"location": "."}, "not a regular file"),
        ({"location": "pipe"}, "not a regular file"),
        ({"location": "away/secret.bin"}, "outside the model's directory"),
        ({"location": "stolen.bin"}, "outside the model's directory"),
        ({"location": "loop"}, "cannot be found"),
        ({"offset": 10_000_000}, "the tensor ends at 10002048"),
        ({"offset": 1}, None),
        ({"length": 10_000_000}, "the tensor ends at"),
        ({"length": 8}, "its type and shape need 2048"),
        ({"offset": -1}, "offset '-1' is not a number"),
        ({"length": "0x10"}, "length '0x10' is not a number"),
        ({"offset": "\u0661"}, "is not a number"),
        ({"offset": "9" * 30}, "is not a number"),
    ],
)
def test_every_escape_and_every_short_file_is_refused_before_anything_is_written(
    tmp_path: Path, entries: dict[str, object], reason: str | None
) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret.bin").write_bytes(bytes(10_000))
    directory = write_model_dir(tmp_path / "m")
    (directory / "away").symlink_to(tmp_path / "private")
    (directory / "stolen.bin").symlink_to(tmp_path / "private" / "secret.bin")
    (directory / "loop").symlink_to("loop")
    os.mkfifo(directory / "pipe")
    edited(directory, "embedding", **entries)
    if reason is None:
        check(directory)
        return
    with pytest.raises(ModelDirError) as caught:
        patch_model(directory, tmp_path / "out", "seq-major")
    assert reason in str(caught.value)
    assert "'embedding'" in str(caught.value)
    assert str(directory) in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m", "private"]


@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.UNDEFINED, 99])
def test_types_without_a_size_cannot_be_external(tmp_path: Path, kind: int) -> None:
    model = tiny_model()
    item = initializer(model, "head")
    move_out(item, "model.onnx.data", 0)
    item.data_type = kind
    directory = write_model_dir(tmp_path / "m", model)
    with pytest.raises(ModelDirError, match="element type"):
        check(directory)


def test_a_negative_shape_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    item = initializer(model, "head")
    move_out(item, "model.onnx.data", 0)
    item.dims[0] = -1
    with pytest.raises(ModelDirError, match="negative"):
        check(write_model_dir(tmp_path / "m", model))


@pytest.mark.parametrize(("kind", "elements", "size"), [(TensorProto.INT4, 5, 3), (TensorProto.UINT4, 2, 1)])
def test_types_below_a_byte_are_packed(tmp_path: Path, kind: int, elements: int, size: int) -> None:
    model = tiny_model()
    item = TensorProto(name="packed", data_type=kind, dims=[elements], data_location=TensorProto.EXTERNAL)
    item.external_data.add(key="location", value="packed.bin")
    model.graph.initializer.append(item)
    directory = write_model_dir(tmp_path / "m", model)
    (directory / "packed.bin").write_bytes(bytes(size))
    assert directory / "packed.bin" in check(directory)
    (directory / "packed.bin").write_bytes(bytes(size - 1))
    with pytest.raises(ModelDirError, match=f"the file has {size - 1} bytes, but the tensor ends at {size}"):
        check(directory)


def test_a_data_file_cut_short_names_some_tensors_and_counts_the_rest(tmp_path: Path) -> None:
    model = tiny_model(layers=6)
    directory = write_model_dir(tmp_path / "m", model)
    (directory / "model.onnx.data").write_bytes(b"version https://git-lfs")
    with pytest.raises(ModelDirError, match=r"and 9 tensors more"):
        check(directory)


def test_a_shared_data_file_serves_several_models(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m")
    second = tiny_model()
    for item in second.graph.initializer:
        if item.name == "embedding":
            move_out(item, "model.onnx.data", 0)
    (directory / "second.onnx").write_bytes(second.SerializeToString())
    patch_model(directory, tmp_path / "out", "seq-major")
    source, result = contents(directory), contents(tmp_path / "out")
    assert source.keys() == result.keys()
    assert [name for name in source if source[name] != result[name]] == ["model.onnx"]


def test_weights_inside_the_model_are_kept(tmp_path: Path) -> None:
    model = tiny_model()
    floats = helper.make_tensor("as_floats", TensorProto.FLOAT, [3], [1.5, float("nan"), -0.0])
    model.graph.initializer.append(floats)
    directory = write_model_dir(tmp_path / "m", model, place=lambda name: None)
    patch_model(directory, tmp_path / "out", "seq-major")
    result = onnx.load(tmp_path / "out" / "model.onnx")
    assert initializer(result, "as_floats").SerializeToString() == floats.SerializeToString()
    for item in model.graph.initializer:
        np.testing.assert_array_equal(
            numpy_helper.to_array(initializer(result, item.name)), numpy_helper.to_array(item)
        )
