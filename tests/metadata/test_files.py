"""Files that are not what their name says."""

from __future__ import annotations

import json
import os

import pytest

from onnx_kv.errors import MetadataError
from onnx_kv.metadata import generate_metadata, write_metadata
from tests.support import decoder

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234\n"


def refusal(directory) -> str:
    with pytest.raises(MetadataError) as caught:
        write_metadata(directory)
    assert not (directory / "inference_metadata.yaml").exists()
    return str(caught.value)


def with_bytes(directory, data: bytes):
    directory.mkdir(exist_ok=True)
    (directory / "genai_config.json").write_bytes(data)
    return directory


def test_a_directory_without_a_config(tmp_path):
    assert "genai_config.json does not exist" in refusal(tmp_path)


@pytest.mark.parametrize("path", ["nowhere", "file"])
def test_no_directory(tmp_path, path):
    (tmp_path / "file").write_text("{}")
    with pytest.raises(MetadataError, match="not a directory"):
        generate_metadata(tmp_path / path)


def test_a_git_lfs_pointer(tmp_path):
    assert "git lfs pull" in refusal(decoder.write(tmp_path, POINTER))


@pytest.mark.parametrize("target", ["../../blobs/1f2e3d", "/data/genai_config.json", "blobs/abc\n"])
def test_the_target_of_a_link_as_text(tmp_path, target):
    message = refusal(decoder.write(tmp_path, target))
    assert repr(target.strip()) in message
    assert "symbolic link" in message


def test_a_link_to_nowhere(tmp_path):
    (tmp_path / "genai_config.json").symlink_to("../blobs/1f2e3d")
    assert "../blobs/1f2e3d" in refusal(tmp_path)


def test_a_link_to_the_config_is_followed(tmp_path):
    blob = tmp_path / "blob"
    blob.write_text(json.dumps(decoder.config()))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "genai_config.json").symlink_to("../blob")
    assert len(generate_metadata(tmp_path / "snapshot").layers) == 2


def test_a_folder_and_a_pipe_are_not_read(tmp_path):
    (tmp_path / "a" / "genai_config.json").mkdir(parents=True)
    assert "not a regular file" in refusal(tmp_path / "a")
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "genai_config.json")
    assert "not a regular file" in refusal(tmp_path / "b")


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "genai_config.json").open("wb") as stream:
        stream.write(b"{")
        stream.truncate(1 << 40)
    assert "1,099,511,627,776 bytes" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b'\xef\xbb\xbf{"model": {}}', ":1:1: "),
        (b'{\n  "model": {\n    "type": "llama",\n  }\n}', ":3:20: "),
        (b'{"a": "\xc3\xa4", "b": [1, 2 , ]}', ":1:23: "),
        (b'{\n "a": 1,,\n "b": 2}', ":2:9: "),
        (b"", ":1:1: "),
        (b"<!DOCTYPE html>\n", ":1:1: "),
        (b'{"a": 1} {"b": 2}', ":1:10: "),
        (b'{\n"a": "\xff"}', ":2:7: "),
        ('{"a": 1}'.encode("utf-16"), ":1:1: "),
        (b"{'model': {}}", ":1:2: "),
        (b'{"model": {} // comment\n}', ":1:14: "),
    ],
)
def test_text_that_is_not_json_is_refused_at_its_place(tmp_path, data, place):
    message = refusal(with_bytes(tmp_path, data))
    assert f"genai_config.json{place}" in message
    assert ("trailing comma" in message) == (b",\n  }" in data or b", ]" in data)


@pytest.mark.parametrize("text", ["[]", '"text"', "3", "null", "true", "1.5"])
def test_json_that_is_no_object(tmp_path, text):
    assert "not an object" in refusal(decoder.write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model": {}, "model": {}}', "'model' twice"),
        ('{"model": NaN}', "NaN"),
        ('{"model": -Infinity}', "Infinity"),
        ("[" * 200_000, ""),
        ('{"a":' * 200_000, ""),
        ('{"model": {"context_length": ' + "9" * 5000 + "}}", ""),
    ],
    ids=["key twice", "NaN", "infinity", "deep array", "deep object", "long number"],
)
def test_json_that_python_would_take_or_trip_over(tmp_path, text, reason):
    assert reason in refusal(decoder.write(tmp_path, text))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (POINTER.encode(), "git lfs pull"),
        (b"../../blobs/1f2e3d", "symbolic link"),
        (b"", "not an ONNX model"),
        (b"\xff" * 64, "not an ONNX model"),
        (b"Entry not found", "not an ONNX model"),
    ],
)
def test_a_graph_that_is_not_one(tmp_path, data, reason):
    decoder.write(tmp_path, decoder.config())
    (tmp_path / "model.onnx").write_bytes(data)
    message = refusal(tmp_path)
    assert "model.onnx" in message
    assert reason in message


def test_half_a_graph(tmp_path):
    decoder.write(tmp_path, decoder.config(), decoder.graph())
    data = (tmp_path / "model.onnx").read_bytes()
    (tmp_path / "model.onnx").write_bytes(data[: len(data) // 2])
    assert "model.onnx" in refusal(tmp_path)


def test_a_graph_that_is_a_dangling_link(tmp_path):
    decoder.write(tmp_path, decoder.config())
    (tmp_path / "model.onnx").symlink_to("../blobs/model")
    assert "../blobs/model" in refusal(tmp_path)


def test_weights_are_not_needed(tmp_path):
    graph = decoder.graph()
    weight = graph.graph.initializer.add(name="/weight", data_type=1, dims=[1 << 20])
    weight.data_location = 1
    weight.external_data.add(key="location", value="model.onnx.data")
    assert len(generate_metadata(decoder.write(tmp_path, decoder.config(), graph)).layers) == 2


def test_an_existing_file_is_kept(tmp_path):
    decoder.write(tmp_path, decoder.config())
    target = tmp_path / "inference_metadata.yaml"
    target.write_text("mine")
    with pytest.raises(MetadataError, match="--force"):
        write_metadata(tmp_path)
    assert target.read_text() == "mine"
    write_metadata(tmp_path, force=True)
    assert target.read_text() == generate_metadata(tmp_path).to_yaml()


def test_force_keeps_the_old_file_where_the_model_is_refused(tmp_path):
    decoder.write(tmp_path, "{")
    target = tmp_path / "inference_metadata.yaml"
    target.write_text("mine")
    with pytest.raises(MetadataError):
        write_metadata(tmp_path, force=True)
    assert target.read_text() == "mine"


def test_a_dangling_link_in_the_way_counts_as_existing(tmp_path):
    decoder.write(tmp_path, decoder.config())
    target = tmp_path / "inference_metadata.yaml"
    target.symlink_to("blob")
    with pytest.raises(MetadataError, match="--force"):
        write_metadata(tmp_path)
    write_metadata(tmp_path, force=True)
    assert not target.is_symlink()
    assert not (tmp_path / "blob").exists()


@pytest.mark.parametrize("name", ["genai_config.json", "model.onnx"])
def test_the_models_own_files_are_never_replaced(tmp_path, name):
    decoder.write(tmp_path, decoder.config(), decoder.graph())
    before = (tmp_path / name).read_bytes()
    with pytest.raises(MetadataError):
        write_metadata(tmp_path, tmp_path / name, force=True)
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("file")])
def test_a_folder_a_device_or_a_link_is_never_replaced(tmp_path, make):
    decoder.write(tmp_path, decoder.config())
    (tmp_path / "file").touch()
    make(tmp_path / "there")
    before = os.lstat(tmp_path / "there").st_mode
    with pytest.raises(MetadataError, match="not a file to write metadata to"):
        write_metadata(tmp_path, tmp_path / "there", force=True)
    assert os.lstat(tmp_path / "there").st_mode == before


def test_nothing_is_left_where_writing_fails(tmp_path, monkeypatch):
    decoder.write(tmp_path, decoder.config())

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(MetadataError, match="No space left"):
        write_metadata(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["genai_config.json"]


def test_a_folder_that_does_not_exist(tmp_path):
    decoder.write(tmp_path, decoder.config())
    with pytest.raises(MetadataError, match="cannot be written"):
        write_metadata(tmp_path, tmp_path / "none" / "metadata.yaml")
