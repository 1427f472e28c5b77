from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from onnx_kv.errors import ModelDirError
from onnx_kv.model_dir import ModelDir
from onnx_kv.model_dir.tree import read_tree
from onnx_kv.patching import patch_model
from tests.support.tiny_model import contents, write_model_dir


def hub_cache(root: Path, filename: str = "model.onnx") -> Path:
    """A model as huggingface_hub keeps it: a snapshot of links into one folder of blobs."""
    plain = write_model_dir(root / "plain", filename=filename)
    snapshot, blobs = root / "models--o--m" / "snapshots" / "abc", root / "models--o--m" / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(item for item in plain.rglob("*") if item.is_file())):
        blob = blobs / f"{number:064x}"
        file.rename(blob)
        link = snapshot / file.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.mark.parametrize("filename", ["model.onnx", "onnx/decoder.onnx"])
@pytest.mark.parametrize("link", [False, True])
def test_a_hub_cache_becomes_plain_files(tmp_path: Path, filename: str, link: bool) -> None:
    snapshot = hub_cache(tmp_path, filename)
    before = contents(snapshot)
    patch_model(snapshot, tmp_path / "out", "seq-major", link=link)
    after = contents(tmp_path / "out")
    assert after.keys() == before.keys()
    assert [name for name in before if before[name] != after[name]] == [filename]
    assert not any(file.is_symlink() for file in (tmp_path / "out").rglob("*"))
    assert contents(snapshot) == before


def test_a_folder_of_links_made_by_hand_works_like_a_hub_cache(tmp_path: Path) -> None:
    original = write_model_dir(tmp_path / "original")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in original.iterdir():
        (linked / file.name).symlink_to(file)
    patch_model(linked, tmp_path / "out", "head-major")
    assert contents(tmp_path / "out") == contents(original)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_side_entry_that_leads_to_private_places_is_refused(tmp_path: Path, kind: str) -> None:
    private = tmp_path / "home" / ".ssh"
    private.mkdir(parents=True)
    (private / "id").write_bytes(b"key")
    directory = write_model_dir(tmp_path / "m")
    (directory / "README.md").symlink_to(private / "id" if kind == "file" else private)
    with pytest.raises(ModelDirError, match=r"README\.md is a link to .*outside the model's directory"):
        patch_model(directory, tmp_path / "out", "seq-major")
    assert not (tmp_path / "out").exists()


def test_links_inside_the_directory_are_followed_or_kept(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m", place=lambda name: "data/w.bin" if name == "head" else None)
    (directory / "same.json").symlink_to("tokenizer.json")
    (directory / "weights").symlink_to(directory / "data")  # absolute, and still inside
    (directory / "data" / "up").symlink_to("..")
    patch_model(directory, tmp_path / "out", "seq-major")
    out = tmp_path / "out"
    assert (out / "same.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert not (out / "same.json").is_symlink()
    assert (out / "weights").readlink() == Path("data")
    assert (out / "data" / "up").resolve() == out


def test_a_decoder_behind_a_link_between_folders_is_patched_once(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m", filename="real/model.onnx")
    (directory / "current").symlink_to("real")
    config = directory / "genai_config.json"
    config.write_text(config.read_text().replace("real/", "current/"))
    patch_model(directory, tmp_path / "out", "seq-major")
    patched = ModelDir.open(tmp_path / "out").load()
    assert "kv_layout" in next(node for node in patched.graph if node.op_type == "GroupQueryAttention").attributes
    assert (tmp_path / "out" / "current").readlink() == Path("real")


def test_a_dangling_link_and_special_files_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m")
    (directory / "vocab.json").symlink_to("../blobs/gone")
    with pytest.raises(ModelDirError, match=r"vocab\.json is a link that leads nowhere"):
        read_tree(ModelDir.open(directory))
    (directory / "vocab.json").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / "s"))
        with pytest.raises(ModelDirError, match="s is neither a file nor a folder"):
            read_tree(ModelDir.open(directory))


def test_unknown_files_empty_folders_and_odd_names_are_kept(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m")
    for name in (".hidden", "päth with space", "new\nline", "a/b/c.bin", "chat_template.jinja"):
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode() + bytes(range(256)))
    (directory / "empty" / "folder").mkdir(parents=True)
    (directory / "nothing").touch()
    patch_model(directory, tmp_path / "out", "paired")
    source, result = contents(directory), contents(tmp_path / "out")
    assert [name for name in source if source[name] != result.get(name)] == ["model.onnx"]
    assert source.keys() == result.keys()
    assert (tmp_path / "out" / "empty" / "folder").is_dir()
