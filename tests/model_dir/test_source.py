from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from onnx_kv.errors import ModelDirError
from onnx_kv.model_dir import ModelDir
from tests.support.tiny_model import tiny_model, write_model_dir


def test_the_config_names_the_decoder(tmp_path: Path) -> None:
    model_dir = ModelDir.open(write_model_dir(tmp_path / "m", filename="text/decoder.onnx"))
    assert model_dir.model_file == tmp_path / "m" / "text" / "decoder.onnx"
    assert model_dir.model_path.as_posix() == "text/decoder.onnx"
    assert model_dir.genai_config is not None
    assert model_dir.load().graph.name == "tiny"


@pytest.mark.parametrize("names", [["model.onnx", "other.onnx"], ["only.onnx"]])
def test_without_config_the_usual_or_the_only_file_is_the_decoder(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(tiny_model().SerializeToString())
    model_dir = ModelDir.open(tmp_path)
    assert model_dir.genai_config is None
    assert model_dir.model_file.name == names[0]


def test_several_decoders_without_config_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelDirError, match=r"a\.onnx, b\.onnx"):
        ModelDir.open(tmp_path)


def test_a_file_is_no_model_directory(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(ModelDirError, match="is not a directory"):
        ModelDir.open(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("filename", "message"),
    [
        ("../model.onnx", "leaves the directory"),
        ("/etc/passwd", "leaves the directory"),
        ("away/model.onnx", "leaves the directory"),
        ("missing.onnx", "is no file"),
        ("", "names no decoder"),
        (7, "names no decoder"),
        ("a\0b", "names no decoder"),
    ],
)
def test_a_decoder_outside_or_missing_is_refused(tmp_path: Path, filename: object, message: str) -> None:
    write_model_dir(tmp_path / "elsewhere")
    directory = write_model_dir(tmp_path / "m")
    (directory / "away").symlink_to(tmp_path / "elsewhere")
    (directory / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"filename": filename}}}))
    with pytest.raises(ModelDirError, match=message):
        ModelDir.open(directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{,}", r"genai_config.json:1:2: not JSON"),
        (b"\xef\xbb\xbf{}", "genai_config.json:1:1: not JSON"),
        (b"\xff\xfe", "genai_config.json:1:1: not UTF-8"),
        (b"[]", "a JSON array, not an object"),
        (b"{}", "model.decoder.filename"),
    ],
)
def test_a_broken_config_is_refused_with_its_place(tmp_path: Path, text: bytes, message: str) -> None:
    directory = write_model_dir(tmp_path / "m")
    (directory / "genai_config.json").write_bytes(text)
    with pytest.raises(ModelDirError, match=message):
        ModelDir.open(directory)


def test_a_config_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m")
    (directory / "genai_config.json").unlink()
    os.mkfifo(directory / "genai_config.json")
    with pytest.raises(ModelDirError, match="not a regular file"):
        ModelDir.open(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an ONNX model"),
        (b"\x08", "is not an ONNX model"),
        (b"hello, world", "is not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    directory = write_model_dir(tmp_path / "m")
    (directory / "model.onnx").write_bytes(content)
    with pytest.raises(ModelDirError, match=message):
        ModelDir.open(directory).load()


def test_a_graph_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.graph.node.append(model.graph.node[0])
    with pytest.raises(ModelDirError, match=r"not a valid ONNX model.*mask_sum"):
        ModelDir.open(write_model_dir(tmp_path / "m", model)).load()


def test_a_file_larger_than_a_protobuf_can_be_is_not_read(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m")
    with open(directory / "model.onnx", "r+b") as file:
        file.truncate(2**31)
    with pytest.raises(ModelDirError, match="2147483648 bytes"):
        ModelDir.open(directory).load()


@pytest.mark.parametrize(("outputs", "expected"), [({}, "logits"), ({"logits": "scores"}, "scores"), (None, "logits")])
def test_the_config_names_outputs(tmp_path: Path, outputs: object, expected: str) -> None:
    directory = write_model_dir(tmp_path / "m")
    config = {"model": {"decoder": {"filename": "model.onnx"} | ({} if outputs is None else {"outputs": outputs})}}
    (directory / "genai_config.json").write_text(json.dumps(config))
    assert ModelDir.open(directory).output_name("logits") == expected
