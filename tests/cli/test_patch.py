from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from onnx_kv.cli import main
from onnx_kv.layout import KvLayout
from tests.support.tiny_model import contents, leftovers, write_model_dir

ROOT = Path(__file__).parents[2]


def patch(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["patch", *map(str, arguments)])


@pytest.mark.parametrize("layout", [layout.cli_name for layout in KvLayout])
def test_every_layout_has_its_name(tmp_path: Path, layout: str) -> None:
    source = write_model_dir(tmp_path / "m")
    result = patch(source, "-o", tmp_path / "out", "--layout", layout)
    assert result.exit_code == 0, result.output
    assert f"wrote {tmp_path / 'out'} ({layout}) from {source}" in result.stdout
    assert result.stderr == ""  # no progress bar in a pipe
    assert contents(tmp_path / "out").keys() == contents(source).keys()


def test_what_each_pass_did_is_printed(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    options = ("--layout", "seq-major", "--lift-sequence-lengths", "--last-token-logits", "--link")
    result = patch(source, "-o", tmp_path / "out", *options)
    assert result.exit_code == 0
    assert "stamp_kv_layout: 2 nodes: head-major to seq-major" in result.stdout
    assert "lift_sequence_lengths: input 'attention_mask' replaced" in result.stdout
    assert "last_token_logits: only the last position reaches MatMul 'lm_head'" in result.stdout
    assert "note: the weights are hard links" in result.stdout
    again = patch(tmp_path / "out", "-o", tmp_path / "again", *options[:4])
    assert again.stdout.count("nothing to change") == 3
    assert "byte for byte the source's" in again.stdout
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_json_is_the_report(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    result = patch(source, "-o", tmp_path / "out", "--layout", "paired", "--dry-run", "--json")
    report = json.loads(result.stdout)
    assert (report["layout"], report["dry_run"], report["changed"]) == ("paired", True, True)
    assert report["passes"][0] == {
        "name": "stamp_kv_layout",
        "changes": ["2 nodes: head-major to paired"],
        "notes": [],
    }
    assert not (tmp_path / "out").exists()
    text = patch(source, "-o", tmp_path / "out", "--layout", "paired", "--dry-run")
    assert text.stdout.startswith("would write ")


def test_refusals_exit_with_2_and_leave_nothing(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    (source / "model.onnx.data").write_bytes(b"")
    before = contents(tmp_path)
    result = patch(source, "-o", tmp_path / "out", "--layout", "seq-major")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert "'embedding'" in result.stderr
    assert contents(tmp_path) == before
    assert leftovers(tmp_path) == []


def test_force_is_asked_for_by_name(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    arguments = (source, "-o", tmp_path / "out", "--layout", "seq-major")
    assert patch(*arguments).exit_code == 0
    refused = patch(*arguments)
    assert (refused.exit_code, "--force" in refused.stderr) == (2, True)
    assert patch(*arguments, "--force").exit_code == 0


@pytest.mark.parametrize("layout", ["sideways", "BNSH", ""])
def test_an_unknown_layout_is_a_usage_error_that_lists_them(tmp_path: Path, layout: str) -> None:
    result = patch(tmp_path, "-o", tmp_path / "out", "--layout", layout)
    assert result.exit_code == 2
    assert "token-major" in result.stderr


def test_undoing(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    patch(source, "-o", tmp_path / "a", "--layout", "seq-major", "--last-token-logits")
    result = patch(tmp_path / "a", "-o", tmp_path / "b", "--layout", "head-major", "--no-last-token-logits")
    assert "all positions reach MatMul 'lm_head' again" in result.stdout
    lifted = patch(source, "-o", tmp_path / "c", "--layout", "seq-major", "--lift-sequence-lengths")
    assert lifted.exit_code == 0
    result = patch(tmp_path / "c", "-o", tmp_path / "d", "--layout", "seq-major", "--no-lift-sequence-lengths")
    assert result.exit_code == 2
    assert "patch the original instead" in result.stderr


def test_the_script_runs_from_a_checkout_anywhere(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/patch_kv_layout.py", source, "-o", "out", "--layout", "seq-major", "--json"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["layout"] == "seq-major"
    patch(source, "-o", tmp_path / "by_command", "--layout", "seq-major")
    assert contents(tmp_path / "out") == contents(tmp_path / "by_command")
