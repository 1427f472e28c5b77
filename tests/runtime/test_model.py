from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onnx_kv.errors import ConfigError, MetadataError, ModelDirError
from onnx_kv.layout import KvLayout
from onnx_kv.metadata import write_metadata
from onnx_kv.runtime.model import RuntimeModel
from tests.conftest import Patched
from tests.support.stock import MODELS

QWEN = MODELS / "qwen2-tiny"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(QWEN, tmp_path / "model"))


def change(directory: Path, **model: Any) -> None:
    """Change keys of the `model` object of a directory's config."""
    file = directory / "genai_config.json"
    config = json.loads(file.read_text())
    config["model"] |= model
    file.write_text(json.dumps(config))


def test_reads_what_a_run_needs(patched: Patched) -> None:
    model = RuntimeModel.open(patched("qwen2-tiny", "token-major", last_token_logits=True))
    assert model.layout is KvLayout.TOKEN_MAJOR
    assert model.passes == ("last_token_logits", "stamp_kv_layout")
    config = json.loads((QWEN / "genai_config.json").read_text())["model"]
    assert len(model.layers) == config["decoder"]["num_hidden_layers"]
    assert model.vocabulary == config["vocab_size"]
    assert model.stop_tokens == {0}


@pytest.mark.parametrize(("eos", "expected"), [(3, {3}), ([3, 5], {3, 5}), (None, set())])
def test_stop_tokens_are_a_number_or_a_list(copy: Path, eos: Any, expected: set[int]) -> None:
    change(copy, eos_token_id=eos)
    assert RuntimeModel.open(copy).stop_tokens == expected


def test_stop_tokens_of_the_generation_settings_count_too(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert RuntimeModel.open(copy).stop_tokens == {0, 7}


@pytest.mark.parametrize("eos", ["0", [1.5], {"a": 1}])
def test_stop_tokens_of_another_type_are_refused(copy: Path, eos: Any) -> None:
    change(copy, eos_token_id=eos)
    with pytest.raises(ModelDirError, match="eos_token_id"):
        RuntimeModel.open(copy)


def test_metadata_beside_the_model_is_used(copy: Path) -> None:
    write_metadata(copy)
    file = copy / "inference_metadata.yaml"
    file.write_text(file.read_text().replace("max_sequence_length: 1024", "max_sequence_length: 77"))
    assert RuntimeModel.open(copy).metadata.max_sequence_length == 77
    file.write_text("model: [")
    with pytest.raises(MetadataError, match=r"inference_metadata\.yaml"):
        RuntimeModel.open(copy)


def test_another_layout_than_the_one_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="has the layout head-major, not seq-major; run: onnx-kv patch"):
        RuntimeModel.open(QWEN, KvLayout.SEQ_MAJOR)


def test_weights_outside_the_directory_are_refused(copy: Path) -> None:
    data = copy / "model.onnx.data"
    outside = copy.parent / "elsewhere.data"
    data.rename(outside)
    data.symlink_to(outside)
    with pytest.raises(ModelDirError, match=r"model\.onnx\.data"):
        RuntimeModel.open(copy)
