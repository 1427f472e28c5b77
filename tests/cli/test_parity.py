from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result

from onnx_kv.cli import main
from tests.conftest import Patched
from tests.support.stock import MODELS
from tests.support.weights import with_weights

QWEN = str(MODELS / "qwen2-tiny")
SHORT = ["--tokens", "3", "--prompt-lengths", "2"]


def parity(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["parity", *arguments])


def test_same(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = parity(QWEN, "--layouts", "head-major,seq-major", *SHORT, "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "seq-major: same as head-major (bit for bit)" in done.output
    report = json.loads(file.read_text())
    assert report["same"] is True
    assert report["bitwise"] is True
    assert [entry["layout"] for entry in report["configurations"]] == ["head-major", "seq-major"]


def test_json_on_stdout_is_all_there_is() -> None:
    done = parity(QWEN, *SHORT, "--json", "-")
    assert json.loads(done.stdout)["same"] is True


def test_different(patched: Patched, tmp_path: Path) -> None:
    other = with_weights(patched("qwen2-tiny", "seq-major"), tmp_path / "other", lambda w: w * np.float32(1.5))
    done = parity(QWEN, str(other), *SHORT)
    assert done.exit_code == 1, done.output
    assert "DIFFERENT" in done.output


def test_what_cannot_be_compared_is_exit_code_2(tmp_path: Path) -> None:
    assert parity(str(tmp_path / "missing")).exit_code == 2
    assert parity(QWEN, "--layouts", "sideways").exit_code == 2
    assert parity(QWEN, "--prompt-lengths", "many").exit_code == 2
    assert parity(QWEN, "--tokens", "2000").exit_code == 2
