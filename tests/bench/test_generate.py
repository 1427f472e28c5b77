"""The benchmark of whole generations: what it reports of a run, and a run that is refused. Times are only there."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from onnx_kv.cli import main

MODEL = Path(__file__).parents[2] / "models" / "qwen2-tiny"


def bench(*options: str) -> Result:
    command = ["bench", "generate", str(MODEL), "--prompt-tokens", "4", "--new-tokens", "16", "--repeats", "1"]
    return CliRunner().invoke(main, [*command, *options])


def test_rows_and_notes(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    done = bench("--min-bucket", "8", "--json", str(target))
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    decode = rows["qwen2-tiny auto min-bucket 8: decode"]
    assert decode["unit"] == "tokens/s"
    assert decode["knobs"]["new_tokens"] == 16
    # 4 + 16 tokens outgrow buckets of 8 and 16; the last token is never written to the cache.
    assert "growth_events=2" in decode["notes"]


def test_a_refused_run_says_why_and_no_more() -> None:
    done = bench("--max-length", "3")
    assert done.exit_code == 2
    assert "max_length" in done.stderr
    assert "Traceback" not in done.stderr
    assert "decoder_worker" not in done.stderr


def test_onnxruntimes_kernels_are_a_rival_of_the_same_tokens(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    done = bench("--against", "ort", "--rival-model", str(MODEL), "--json", str(target))
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    rival = rows["onnxruntime: decode"]
    assert rival["knobs"]["stock"] is True
    assert not any("tokens differ" in note for note in rival["notes"])


def test_a_rival_needs_its_model() -> None:
    done = bench("--against", "ort")
    assert done.exit_code == 2
    assert "--rival-model" in done.stderr
