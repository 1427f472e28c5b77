"""Shipped models, patched: the metadata beside the graph follows it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from onnx_kv import KvLayout, patch_model
from onnx_kv.errors import MetadataError
from onnx_kv.metadata import generate_metadata, load_metadata, validate_metadata, write_metadata

ROOT = Path(__file__).parents[2]
MODELS = sorted(path.parent for path in (ROOT / "models").glob("*/genai_config.json"))


@pytest.fixture
def described(tmp_path):
    directory = tmp_path / "described"
    shutil.copytree(ROOT / "models" / "qwen2-tiny", directory)
    write_metadata(directory)
    return directory


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_every_shipped_model_is_described_without_a_warning(model):
    metadata = generate_metadata(model, full=True)
    assert metadata.warnings == ()
    assert metadata.max_sequence_length == 1024
    assert metadata.attention is not None


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("lift", [None, True])
def test_the_file_follows_the_graph(described, tmp_path, layout, lift):
    output = tmp_path / "out"
    patch_model(described, output, layout, lift_sequence_lengths=lift)
    assert validate_metadata(output).agrees
    assert (output / "inference_metadata.yaml").read_text() == generate_metadata(output).to_yaml()
    assert load_metadata(output).kv_layout is layout
    assert (load_metadata(output).attention_mask_input is None) == bool(lift)


def test_there_and_back_gives_the_same_file(described, tmp_path):
    patch_model(described, tmp_path / "there", KvLayout.PAIRED)
    patch_model(tmp_path / "there", tmp_path / "back", KvLayout.HEAD_MAJOR)
    name = "inference_metadata.yaml"
    assert (tmp_path / "back" / name).read_bytes() == (described / name).read_bytes()


def test_a_patch_makes_no_metadata(described, tmp_path):
    (described / "inference_metadata.yaml").unlink()
    patch_model(described, tmp_path / "out", KvLayout.SEQ_MAJOR)
    assert not (tmp_path / "out" / "inference_metadata.yaml").exists()


def test_metadata_that_cannot_follow_refuses_the_patch(described, tmp_path):
    (described / "inference_metadata.yaml").write_text("model: [")
    with pytest.raises(MetadataError):
        patch_model(described, tmp_path / "out", KvLayout.SEQ_MAJOR)
    assert not (tmp_path / "out").exists()
