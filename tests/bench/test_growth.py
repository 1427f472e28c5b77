"""The growth benchmark on the host: its counts on paper, and its command. Times are only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from onnx_kv.bench.growth import FIRST, GROWTH, LONGEST, MEAN, GrowthSettings, bench_growth
from onnx_kv.bench.process import WorkerError
from onnx_kv.cli import main
from onnx_kv.errors import CapacityError
from onnx_kv.planning.source import cache_of_geometry

MODEL = cache_of_geometry("2x2x16", dtype=None, max_length=256)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 2
PAGE = 4096


def settings(tokens: int = 40, budget: int = 1 << 30, commit_aheads: tuple[int, ...] = (0,)) -> GrowthSettings:
    return GrowthSettings("cpu", 1, tokens, 8, commit_aheads, PAGE, budget)


def test_counts_are_the_plans() -> None:
    costs = {cost.name: cost for cost in bench_growth(MODEL, settings(), repeats=1)}
    assert list(costs) == [
        "head-major fixed_stride, 0 ahead",
        "head-major bucket, 0 ahead",
        "seq-major fixed_stride, 0 ahead",
        "paired fixed_stride, 0 ahead",
        "token-major fixed_stride, 0 ahead",
        "head-major realloc",
    ]
    bucket, realloc = costs["head-major bucket, 0 ahead"], costs["head-major realloc"]
    # From a bucket of 8 the cache grows at 8, 16 and 32 tokens.
    assert all(cost.growth_events == 3 for cost in costs.values())
    assert bucket.bytes_moved == realloc.bytes_moved == realloc.bytes_copied == (8 + 16 + 32) * TOKEN_BYTES
    assert bucket.bytes_copied == bucket.bytes_moved // 2  # one of two heads stays where it is
    assert realloc.physical_bytes == 64 * TOKEN_BYTES
    # Stripes are 8 KiB apart, and 40 tokens of 32 bytes are within a page: a page for each of 2 · 2 · 2 heads.
    assert costs["head-major fixed_stride, 0 ahead"].physical_bytes == 8 * PAGE
    assert costs["token-major fixed_stride, 0 ahead"].physical_bytes == 3 * PAGE  # 10,240 bytes
    assert costs["seq-major fixed_stride, 0 ahead"].bytes_moved == 0
    assert list(bucket.times) == [FIRST, GROWTH, LONGEST, MEAN]
    assert bucket.times[GROWTH].samples == 3


def test_more_tokens_than_the_maximum_are_refused() -> None:
    with pytest.raises(CapacityError, match=r"300.*256"):
        bench_growth(MODEL, settings(tokens=300), repeats=1)


def test_a_budget_is_kept() -> None:
    with pytest.raises(WorkerError, match="--budget"):
        bench_growth(MODEL, settings(budget=PAGE), repeats=1)


def test_command_writes_a_result(tmp_path: Path) -> None:
    target = tmp_path / "growth.json"
    command = ["bench", "growth", "--geometry", "1x2x16", "--max-length", "64", "--min-bucket", "8", "--repeats", "1"]
    done = CliRunner().invoke(main, [*command, "--commit-ahead", "4", "--granularity", "4k", "--json", str(target)])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    assert rows["paired fixed_stride, 4 ahead: a growth"]["knobs"]["commit_ahead"] == 4
    assert rows["head-major realloc: a growth"]["samples"] == 3
