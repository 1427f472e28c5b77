"""`onnx-kv metadata` and `onnx-kv validate`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from onnx_kv.cli import main
from onnx_kv.metadata import generate_metadata
from tests.support import decoder


def run(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def model(tmp_path):
    return decoder.write(tmp_path / "model", decoder.config(), decoder.graph())


def test_metadata_writes_the_file(model):
    result = run("metadata", model)
    assert result.exit_code == 0
    assert "inference_metadata.yaml: 2 cached layers, 8,192 tokens, head-major" in result.stdout
    assert (model / "inference_metadata.yaml").read_text() == generate_metadata(model).to_yaml()
    refused = run("metadata", model)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert run("metadata", model, "--force", "--full").exit_code == 0
    assert "attention:" in (model / "inference_metadata.yaml").read_text()


def test_metadata_prints(model):
    result = run("metadata", model, "--stdout")
    assert result.stdout == generate_metadata(model).to_yaml()
    assert not (model / "inference_metadata.yaml").exists()
    assert run("metadata", model, "--stdout", "-o", model / "x").exit_code == 2


def test_metadata_writes_elsewhere(model, tmp_path):
    assert run("metadata", model, "--output", tmp_path / "there.yaml").exit_code == 0
    assert (tmp_path / "there.yaml").read_text() == generate_metadata(model).to_yaml()


def test_warnings_go_to_stderr(tmp_path):
    directory = decoder.write(tmp_path, decoder.config(surprise=1), decoder.graph())
    result = run("metadata", directory, "--stdout")
    assert "surprise" not in result.stdout
    assert "warning: unknown key model.decoder.surprise is ignored" in result.stderr


def test_a_refusal_is_code_2_and_leaves_no_file(tmp_path):
    directory = decoder.write(tmp_path, decoder.config(pipeline=[{"a": {}}]))
    result = run("metadata", directory)
    assert result.exit_code == 2
    assert "model.decoder.pipeline" in result.stderr
    assert not (directory / "inference_metadata.yaml").exists()


def test_validate_agrees_differs_or_cannot_tell(model):
    assert run("validate", model).exit_code == 2
    run("metadata", model)
    agrees = run("validate", model)
    assert (agrees.exit_code, agrees.stderr) == (0, "")
    assert "agrees with" in agrees.stdout
    file = model / "inference_metadata.yaml"
    file.write_text(file.read_text().replace("present.1.key", "present.7.key"))
    differs = run("validate", model)
    assert differs.exit_code == 1
    assert "io.kv_outputs[2]: the graph has no output 'present.7.key'" in differs.stdout
    file.write_text("model: [")
    assert run("validate", model).exit_code == 2


def test_validate_as_json(model):
    run("metadata", model)
    file = model / "inference_metadata.yaml"
    assert json.loads(run("validate", model, "--json").stdout)["agrees"] is True
    file.write_text(file.read_text().replace("logits_output: logits", "logits_output: scores"))
    result = run("validate", model, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["agrees"] is False
    assert report["layers"] == 2
    assert [problem["field"] for problem in report["disagreements"]] == ["io.logits_output"]
