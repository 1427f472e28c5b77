"""The script of a checkout, without installing: as a process of its own, with whatever packages there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_kv.metadata import generate_metadata
from tests.support import decoder

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gen_inference_metadata.py"


def run(*arguments: object, bare: bool = False, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script; `bare` without any installed package."""
    python = [sys.executable, "-I", "-S"] if bare else [sys.executable]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [*python, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=60)


@pytest.fixture
def model(tmp_path):
    return decoder.write(tmp_path / "model", decoder.config(), decoder.graph())


def test_writes_refuses_to_overwrite_and_is_forced(model):
    target = model / "inference_metadata.yaml"
    result = run(model)
    assert (result.returncode, result.stderr) == (0, "")
    assert target.read_text() == generate_metadata(model).to_yaml()
    target.write_text("mine")
    result = run(model)
    assert result.returncode == 2
    assert "--force" in result.stderr
    assert target.read_text() == "mine"
    assert run(model, "--force").returncode == 0
    assert target.read_text() == generate_metadata(model).to_yaml()


@pytest.mark.parametrize("bare", [False, True])
def test_prints_from_any_folder(model, tmp_path, bare):
    result = run("model", "--stdout", cwd=tmp_path, bare=bare)
    assert result.returncode == 0
    assert result.stdout == generate_metadata(model).to_yaml()
    assert ("onnx_ir" in result.stderr) == bare
    assert not (model / "inference_metadata.yaml").exists()


def test_writes_elsewhere_and_in_full(model, tmp_path):
    assert run(model, "--output", tmp_path / "other.yaml", "--full").returncode == 0
    assert (tmp_path / "other.yaml").read_text() == generate_metadata(model, full=True).to_yaml()
    assert not (model / "inference_metadata.yaml").exists()


@pytest.mark.parametrize("bare", [False, True])
def test_a_refusal_is_one_message_and_code_2(tmp_path, bare):
    config = decoder.config()
    del config["model"]["context_length"]
    result = run(decoder.write(tmp_path, config), bare=bare)
    assert result.returncode == 2
    assert "missing key 'context_length' in model" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "inference_metadata.yaml").exists()


@pytest.mark.parametrize(
    ("layers", "attributes", "reason"),
    [([0], {}, "past_key_values.1.key"), ([0, 1], {"kv_layout": 1}, "patched")],
    ids=["a layer without a cache", "a patched graph"],
)
def test_with_no_reader_for_the_graph_it_says_so_rather_than_guess(tmp_path, layers, attributes, reason):
    directory = decoder.write(tmp_path, decoder.config(), decoder.graph(layers, attributes=attributes))
    result = run(directory, "--stdout", bare=True)
    assert result.returncode == 2
    assert reason in result.stderr
    assert "pip install onnx_ir" in result.stderr
    assert run(directory, "--stdout").returncode == 0
