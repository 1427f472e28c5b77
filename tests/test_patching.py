from __future__ import annotations

import json
from pathlib import Path

import pytest

import onnx_kv
from onnx_kv.errors import ConfigError, MetadataError, PatchRefusedError
from onnx_kv.layout import KvLayout
from onnx_kv.metadata import load_metadata, validate_metadata, write_metadata
from onnx_kv.patching import patch_model
from tests.support.tiny_model import contents, write_model_dir

MODELS = Path(__file__).parents[1] / "models"
QWEN = MODELS / "qwen2-tiny"


def test_the_documented_entry_is_the_one_of_the_package() -> None:
    assert onnx_kv.patch_model is patch_model


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    report = patch_model(source, tmp_path / "out", KvLayout.SEQ_MAJOR, last_token_logits=True)
    assert [outcome.name for outcome in report.passes] == ["stamp_kv_layout", "last_token_logits"]
    assert report.passes[0].changes == ("2 nodes: head-major to seq-major",)
    assert (report.layout, report.rewritten, report.dry_run) == (KvLayout.SEQ_MAJOR, ("model.onnx",), False)
    assert report.linked_bytes == 0
    printed = json.loads(json.dumps(report.to_json()))
    assert printed["layout"] == "seq-major"
    assert printed["output"] == str(tmp_path / "out")
    assert printed["changed"] is True


def test_a_model_that_already_is_as_wanted_is_copied(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    report = patch_model(source, tmp_path / "out", "head-major")
    assert (report.rewritten, report.passes[0].changes, report.to_json()["changed"]) == ((), (), False)
    assert contents(tmp_path / "out") == contents(source)


def test_layouts_are_spelled_as_in_yaml_too(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    assert patch_model(source, tmp_path / "out", "seq_major_bsnh").layout is KvLayout.SEQ_MAJOR
    with pytest.raises(ConfigError, match="no KV layout is called 'sideways'; use one of: head-major"):
        patch_model(source, tmp_path / "other", "sideways")


def test_one_refused_pass_refuses_the_whole_patch(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    patch_model(source, tmp_path / "lifted", "seq-major", lift_sequence_lengths=True)
    with pytest.raises(PatchRefusedError, match="patch the original instead"):
        patch_model(tmp_path / "lifted", tmp_path / "out", "head-major", lift_sequence_lengths=False)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["lifted", "m"]


@pytest.mark.parametrize("lift", [None, True])
@pytest.mark.parametrize("layout", list(KvLayout))
def test_metadata_follows_in_the_same_step(tmp_path: Path, layout: KvLayout, lift: bool | None) -> None:
    source = tmp_path / "m"
    source.mkdir()
    for name, data in contents(QWEN).items():
        (source / name).write_bytes(data)
    write_metadata(source)
    report = patch_model(source, tmp_path / "out", layout, lift_sequence_lengths=lift)
    metadata = load_metadata(tmp_path / "out")
    assert metadata.kv_layout is layout
    assert (metadata.attention_mask_input is None) is bool(lift)
    assert not validate_metadata(tmp_path / "out").disagreements
    assert ("inference_metadata.yaml" in report.rewritten) is (bool(lift) or layout is not KvLayout.HEAD_MAJOR)
    back = patch_model(tmp_path / "out", tmp_path / "back", "head-major")
    assert load_metadata(tmp_path / "back").kv_layout is KvLayout.HEAD_MAJOR
    if lift is None:
        assert contents(tmp_path / "back") == contents(source), back


def test_metadata_that_cannot_follow_refuses_the_patch(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    (source / "inference_metadata.yaml").write_text("model: [not, a, mapping]\n")
    with pytest.raises(MetadataError, match=r"inference_metadata\.yaml"):
        patch_model(source, tmp_path / "out", "seq-major")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m"]


def test_the_config_stays_byte_for_byte(tmp_path: Path) -> None:
    patch_model(QWEN, tmp_path / "out", "token-major", lift_sequence_lengths=True, last_token_logits=True)
    before, after = contents(QWEN), contents(tmp_path / "out")
    assert [name for name in before if before[name] != after[name]] == ["model.onnx"]
