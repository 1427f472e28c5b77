"""The floor sweep against arithmetic on paper, on the host: Qwen2.5-14B at a thirty-second of its size.

48 layers and 8 KV heads as in the model, but heads of 4 instead of 128 and granules of 64 KiB instead of 2 MiB: every
count of granules is the real model's, and the largest cache takes 48 MiB.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from onnx_kv.bench.sweep import Sweep, run_sweep
from onnx_kv.cli import main
from onnx_kv.errors import CapacityError, ConfigError, OutOfMemoryError
from onnx_kv.geometry import ByteRange
from onnx_kv.planning.source import ModelCache, cache_of_geometry
from onnx_kv.planning.window_map import live_fractions

GRANULE = 64 << 10
SCALE = 32
COMMAND = ["sweep", "--geometry", "48x8x4", "--max-length", "8192", "--granularity", "64KiB"]


def model() -> ModelCache:
    return cache_of_geometry("48x8x4", dtype=None, max_length=8192)


def small_sweep(**changes: Any) -> Sweep:
    settings = {"contexts": [8], "capacities": [1024], "boundary": 512, "budget": 1 << 30, "granule": GRANULE}
    return run_sweep(model(), **{**settings, **changes})


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return small_sweep(contexts=[2048, 8], capacities=[1024, 2048, 4096, 8192])


def test_pinned_buckets_commit_the_same_in_both_layouts(sweep: Sweep) -> None:
    granules = {(p.layout.cli_name, p.min_bucket): p.measured // GRANULE for p in sweep.pinned}
    # A binding of 1,024 tokens is one granule: 1,024 · 8 heads · 4 · 2 bytes = 64 KiB.
    paper = {1024: 96, 2048: 192, 4096: 384, 8192: 768}
    assert granules == {(name, size): count for name in ("head-major", "seq-major") for size, count in paper.items()}


def test_fixed_strides_commit_their_floors(sweep: Sweep) -> None:
    granules = {
        (p.layout.cli_name, p.policy.value): p.measured // GRANULE for p in sweep.free if p.length == 8
    }  # fmt: skip
    assert granules == {
        ("head-major", "fixed_stride"): 768,
        ("head-major", "bucket"): 96,
        ("seq-major", "fixed_stride"): 96,
        ("paired", "fixed_stride"): 48,
        ("token-major", "fixed_stride"): 1,
    }


def test_one_step_over_a_boundary(sweep: Sweep) -> None:
    steps = {step.layout.cli_name: step for step in sweep.steps}
    assert (steps["head-major"].moved, steps["head-major"].kept) == (512 * 196_608 // SCALE, False)
    # In place, the first of each binding's 8 stripes stays where it is.
    assert steps["head-major"].copied == 512 * 196_608 // SCALE * 7 // 8
    assert all((steps[name].moved, steps[name].kept) == (0, True) for name in ("seq-major", "paired", "token-major"))


def test_measured_agrees_with_planned(sweep: Sweep) -> None:
    assert sweep.agrees
    assert len(sweep.free) == 5 * 2


def test_a_pinned_knob_is_no_finding(sweep: Sweep) -> None:
    statements = sweep.statements()
    withheld = [statement for statement in statements if statement.withheld]
    assert len(withheld) == 4
    assert all(f"min_bucket={size} made these equal" in str(s.withheld) for s, size in zip(
        withheld, (1024, 2048, 4096, 8192), strict=True
    ))  # fmt: skip
    assert not any("smallest bucket" in statement.text for statement in statements if not statement.withheld)


def test_a_bucket_that_its_length_needs_is_a_finding() -> None:
    """A smallest bucket of 16 that holds 16 tokens decides nothing: the tokens would have made it."""
    needed = small_sweep(contexts=[16], capacities=[16])
    assert [point.pinned_by for point in needed.pinned] == [None, None]
    assert not any(statement.withheld for statement in needed.statements())


def test_rows_of_a_batch_have_stripes_of_their_own() -> None:
    free = small_sweep(batch=2).free
    assert {p.layout.cli_name: p.measured // GRANULE for p in free if p.policy == "fixed_stride"} == {
        "head-major": 1536,
        "seq-major": 192,
        "paired": 96,
        "token-major": 2,
    }


def test_a_boundary_that_is_no_bucket_is_refused() -> None:
    for boundary in (500, 8192):
        with pytest.raises(ConfigError, match=rf"{boundary} tokens is no bucket.*power of two below.*8192"):
            small_sweep(boundary=boundary)


def test_a_context_beyond_the_maximum_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"9000.*8192"):
        small_sweep(contexts=[9000])


def test_a_cache_over_the_budget_is_refused_before_it_is_made() -> None:
    with pytest.raises(OutOfMemoryError, match=r"50,331,648 bytes.*--budget"):
        small_sweep(budget=1 << 20, capacities=[8192])


def test_live_fractions() -> None:
    ranges = [ByteRange(0, 64), ByteRange(96, 228), ByteRange(300, 310)]
    # Windows of 64 bytes: full; half full; full; 36 bytes; 10 bytes.
    np.testing.assert_allclose(live_fractions(ranges, 320, 64), [1, 0.5, 1, 36 / 64, 10 / 64])


def test_command_prints_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib (extra [plot])")
    plot, windows = tmp_path / "committed.png", tmp_path / "windows.svg"
    done = CliRunner().invoke(
        main, [*COMMAND, "--contexts", "8,512", "--plot", str(plot), "--window-map", str(windows)]
    )
    assert done.exit_code == 0, done.output
    assert "every figure is as planned" in done.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in windows.read_text()


def test_json_keeps_withheld_statements_apart() -> None:
    done = CliRunner().invoke(main, [*COMMAND, "--capacities", "8192", "--json"])
    result = json.loads(done.output)
    assert result["agrees"] is True
    assert result["knobs"]["granule"] == GRANULE
    assert [entry["withheld"][:15] for entry in result["withheld"]] == ["min_bucket=8192"]
    assert all("smallest bucket" not in text for text in result["findings"])
    assert {point["pinned_by"] for point in result["pinned"]} == {"min_bucket=8192"}


@pytest.mark.parametrize(
    "arguments", [[], ["models/x", "--geometry", "1x1x1"], ["--geometry", "48x8", "--max-length", "8"]]
)
def test_unusable_models_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["sweep", *arguments]).exit_code == 2
