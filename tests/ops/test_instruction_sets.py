"""Every instruction set that the CPU kernels are compiled for, where this processor has it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = {"portable": (), "avx2": ("avx2", "fma", "f16c"), "avx512": ("avx512f", "avx512bw", "avx512vl")}


def processor_flags() -> set[str]:
    """What the kernel says of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":")[1].split())
    return set()


def run_with(kernels: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that is told which kernels to use."""
    environment = {**os.environ, "ONNX_KV_CPU_KERNELS": kernels, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("kernels", NEEDS)
def test_agrees_with_the_reference(kernels: str) -> None:
    if not set(NEEDS[kernels]) <= processor_flags():
        pytest.skip(f"this processor cannot run the {kernels} kernels")
    done = run_with(kernels, ["-m", "pytest", "-p", "no:cacheprovider", "tests/ops/test_gqa_reference.py"])
    assert done.returncode == 0, done.stdout


def test_a_name_that_cannot_be_run() -> None:
    done = run_with("sse9", ["-m", "tests.support.version_probe"])
    assert "ONNX_KV_CPU_KERNELS is sse9, but this processor can run: " in done.stderr
    assert ("avx2" in done.stderr) == (platform.machine() == "x86_64" and "avx2" in processor_flags())
