"""What a newcomer does wrong, and what each command says to it: the thing at fault, and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from onnx_kv.cli import main

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / "qwen2-tiny", tmp_path / "model"))


def refusal(*arguments: object) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 2, done.output
    return done.output


COMMANDS = (
    ["inspect"],
    ["patch", "-o", "x", "--layout", "paired"],
    ["metadata"],
    ["validate"],
    ["parity"],
    ["generate", "--prompt", "x"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_such_directory(command: list[str], tmp_path: Path) -> None:
    output = refusal(command[0], tmp_path / "nowhere", *command[1:])
    assert f"{tmp_path / 'nowhere'} is not a directory; give the directory that holds" in output


def test_a_graph_is_no_directory(model: Path) -> None:
    assert "is not a directory" in refusal("inspect", model / "model.onnx")
    assert "is a graph; give its directory" in refusal("plan", model / "model.onnx")


def test_a_plan_without_a_config_needs_a_length(model: Path) -> None:
    (model / "genai_config.json").unlink()
    assert "--max-length" in refusal("plan", model)
    done = CliRunner().invoke(main, ["plan", str(model), "--max-length", "512", "--json"])
    assert done.exit_code == 0, done.output


def test_validating_what_was_never_written(model: Path) -> None:
    assert f"write it with: onnx-kv metadata {model}" in refusal("validate", model)


def test_weights_that_were_not_fetched(model: Path, tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (model / "model.onnx.data").write_text(pointer)
    output = refusal("patch", model, "-o", tmp_path / "out", "--layout", "seq-major")
    assert "it is a Git LFS pointer, not the weights; run `git lfs pull`" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command", [["plan", "--plot"], ["sweep", "--window-map"], ["bench", "growth", "--json"]], ids=" ".join
)
def test_a_report_that_could_not_be_written_is_refused_first(command: list[str], tmp_path: Path) -> None:
    output = refusal(*command, tmp_path / "none" / "file.png", "--geometry", "1x1x8", "--max-length", "8")
    assert "is no folder that can be written to" in output
