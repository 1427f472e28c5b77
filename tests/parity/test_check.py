from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from onnx_kv import check_parity
from onnx_kv.errors import CapacityError, ConfigError, ParityError
from onnx_kv.parity.compare import TOLERANCE
from tests.conftest import Patched
from tests.support.stock import MODELS
from tests.support.weights import with_weights

QWEN = MODELS / "qwen2-tiny"
SHORT = {"tokens": 4, "prompt_lengths": (1, 9)}


def test_layouts_of_an_exported_model_and_stock(tmp_path: Path) -> None:
    names: list[str] = []
    source = Path(shutil.copytree(QWEN, tmp_path / "source"))
    report = check_parity(source, against_stock=True, on_run=names.append, **SHORT)
    assert report.same
    assert report.bitwise
    assert names == ["head-major", "seq-major", "stock"]
    entries = report.to_json()["configurations"]
    assert [entry["layout"] for entry in entries] == ["head-major", "seq-major", "head-major"]
    assert [entry["kernels"] for entry in entries] == ["onnx_kv", "onnx_kv", "onnxruntime"]
    assert [entry["against"] for entry in entries] == [None, "head-major", "head-major"]
    assert [entry["tolerance"] for entry in entries[1:]] == [0.0, TOLERANCE["float32"]]
    assert entries[0]["tokens"] == entries[1]["tokens"] == entries[2]["tokens"]
    assert [len(tokens) for tokens in entries[0]["tokens"]] == [4, 4]
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    assert files == {file.name: file.read_bytes() for file in QWEN.iterdir()}, "the source is left as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_two_directories(patched: Patched) -> None:
    report = check_parity(patched("qwen2-tiny", "seq-major"), patched("qwen2-tiny", "paired"), **SHORT)
    assert report.same
    assert report.verdicts[1].exact


def test_another_computation_need_not_be_equal_in_every_bit(patched: Patched) -> None:
    lifted = patched("llama-int4", "seq-major", lift_sequence_lengths=True, last_token_logits=True)
    report = check_parity(patched("llama-int4", "seq-major"), lifted, **SHORT)
    assert report.same
    assert not report.verdicts[1].exact
    assert report.verdicts[1].tolerance == TOLERANCE["int8"]


def test_other_weights_are_different(tmp_path: Path, patched: Patched) -> None:
    changed = with_weights(patched("qwen2-tiny", "seq-major"), tmp_path / "changed", lambda w: w * np.float32(1.0001))
    report = check_parity(patched("qwen2-tiny", "head-major"), changed, **SHORT)
    assert not report.same
    assert not report.bitwise
    first = report.verdicts[1].prompts[0].first_logit_difference
    assert first is not None
    assert first.step == 0


def test_logits_that_are_not_finite_fail(tmp_path: Path, patched: Patched) -> None:
    changed = with_weights(patched("qwen2-tiny", "seq-major"), tmp_path / "nan", lambda w: w * np.float32(np.nan))
    report = check_parity(patched("qwen2-tiny", "head-major"), changed, **SHORT)
    assert not report.same
    assert "not finite" in str(report.to_json()["configurations"][1]["failure"])


def test_two_runs_of_one_layout_compare_nothing() -> None:
    with pytest.raises(ParityError, match="nothing was compared"):
        check_parity(QWEN, QWEN, **SHORT)


def test_a_configuration_that_does_not_run_is_named(tmp_path: Path, patched: Patched) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(patched("qwen2-tiny", "seq-major"), broken)
    (broken / "model.onnx").write_bytes(b"")
    with pytest.raises(ParityError, match=r"configuration .*broken.* could not run: .*model\.onnx"):
        check_parity(QWEN, broken, **SHORT)


def test_refuses_what_cannot_be_compared() -> None:
    with pytest.raises(CapacityError, match=r"1020 tokens and 64 to generate need 1084, .* room for 1024"):
        check_parity(QWEN, prompt_lengths=[1020])
    with pytest.raises(ConfigError, match="compares with nothing"):
        check_parity(QWEN, layouts=["seq-major"])
    with pytest.raises(ConfigError, match="at least 1"):
        check_parity(QWEN, prompt_lengths=[0])
