"""The sweep, the growth benchmark, the attention benchmark and the profiler on a real device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_kv.bench import attention_cuda
from onnx_kv.bench.attention import ORT, Case, Shape
from onnx_kv.bench.growth import GrowthSettings, bench_growth
from onnx_kv.bench.sweep import run_sweep
from onnx_kv.planning.source import cache_of_geometry
from tests.conftest import Patched

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu


def test_floor_sweep_of_qwen_14b() -> None:
    model = cache_of_geometry("48x8x128", dtype=None, max_length=8192)
    sweep = run_sweep(
        model, device="cuda", contexts=[8], capacities=[1024, 2048, 4096, 8192], boundary=512, budget=2 << 30
    )
    assert sweep.agrees
    bindings = 96
    # A binding's token is 2 KiB, a head's 256 bytes, the model's 192 KiB: on paper, for granules of any size.
    granule = sweep.knobs.granule
    packed = {size: bindings * -(-size * 2048 // granule) for size in (1024, 2048, 4096, 8192)}
    assert [point.measured // granule for point in sweep.pinned] == [n for n in packed.values() for _ in range(2)]
    if granule == 2 << 20:
        assert [point.measured // granule for point in sweep.free] == [768, 96, 96, 48, 1]
    steps = {step.layout.cli_name: (step.moved, step.kept) for step in sweep.steps}
    assert steps["head-major"] == (100_663_296, False)
    assert steps["seq-major"] == (0, True)


def test_growth_is_measured() -> None:
    model = cache_of_geometry("4x2x64", dtype=None, max_length=1024)
    settings = GrowthSettings("cuda", 1, 128, 32, (64,), None, 1 << 30)
    costs = {cost.name: cost for cost in bench_growth(model, settings, repeats=1)}
    assert costs["head-major bucket, 64 ahead"].bytes_moved == (32 + 64) * 4 * 2 * 2 * 64 * 2
    assert costs["seq-major fixed_stride, 64 ahead"].bytes_moved == 0


@pytest.mark.parametrize("case", [Case.decode(300), Case.prefill(256)], ids=lambda case: case.name)
def test_attention_is_measured(case: Case) -> None:
    found = attention_cuda.measure(Shape(4, 2, 64, 2), case)
    assert {"head-major", "seq-major", "paired", "token-major"} <= set(found.samples)
    assert all(sample > 0 for samples in found.samples.values() for sample in samples)
    if ORT not in found.samples:
        pytest.fail(f"ONNX Runtime's node was left out: {found.missing[ORT]}")


def test_copies_have_a_bandwidth() -> None:
    assert attention_cuda.copy_bandwidth() > 1e10


def test_a_step_is_profiled(patched: Patched, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="kernels are timed through torch's profiler")
    model = patched("llama-fp16", "seq-major", lift_sequence_lengths=True, last_token_logits=True)
    target = tmp_path / "profile.json"
    command = [sys.executable, "tools/profile_decode.py", str(model), "--device", "cuda", "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    profile = json.loads(target.read_text())
    assert any("gqa" in kernel["name"] for kernel in profile["kernels"])
    assert profile["stats"]["decline_reason"] is None
