from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from onnx_kv.cli import main
from onnx_kv.patching import patch_model
from tests.support.tiny_model import tiny_model, write_model_dir


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def test_text_shows_nodes_cache_and_passes(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m", tiny_model(local_window_size=16))
    patch_model(source, tmp_path / "out", "token-major")
    result = inspect(tmp_path / "out")
    assert result.exit_code == 0, result.output
    for words in (
        "IR version 10, opsets onnx 21, com.microsoft 1",
        "cache: token-major, 2 layers, 128 bytes a token",
        "layer.1/attention  2/1    8     float32  16      32, 16",
        "passes applied: stamp_kv_layout",
        "stamp_kv_layout token-major  already so",
        "stamp_kv_layout head-major   possible",
    ):
        assert words in result.stdout, result.stdout


def test_json(tmp_path: Path) -> None:
    result = inspect(write_model_dir(tmp_path / "m"), "--json")
    found = json.loads(result.stdout)
    assert (found["layout"], found["bytes_per_token"]) == ("head-major", 128)
    assert found["layers"][0]["shape"] == {"kv_heads": 1, "head_dim": 8}
    assert found["layers"][0]["layout"] == "head-major"
    assert found["states"][1]["state"] == "possible"


def test_attention_that_is_not_understood_is_shown(tmp_path: Path) -> None:
    model = tiny_model()
    del model.graph.value_info[:]
    result = inspect(write_model_dir(tmp_path / "m", model))
    assert result.exit_code == 0
    assert "attention: node 'layer.0/attention': its head size is unknown" in result.stdout


def test_what_is_no_model_exits_with_2(tmp_path: Path) -> None:
    result = inspect(tmp_path / "nothing")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not a directory" in result.stderr
