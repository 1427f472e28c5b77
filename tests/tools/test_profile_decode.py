"""The decode profiler: its sums on a trace made by hand, and the whole command on a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.profile_decode import Kernel, node_kernels

ROOT = Path(__file__).parents[2]


def event(name: str, ts: int, dur: int, operator: str | None = None) -> dict[str, Any]:
    return {
        "cat": "Node" if operator else "Session",
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {"op_name": operator} if operator else {},
    }


TRACE = [
    event("session_initialization", 0, 900),
    # A prefill that does not count, and three steps of two products and an attention.
    event("model_run", 1000, 500),
    event("/a/MatMul_kernel_time", 1010, 400, "MatMul"),
    *(
        found
        for step, slow in enumerate((0, 0, 50))
        for found in (
            event("model_run", 2000 + 1000 * step, 100 + slow),
            event("/a/MatMul_kernel_time", 2010 + 1000 * step, 30, "MatMul"),
            event("/b/MatMul_kernel_time", 2045 + 1000 * step, 10 + slow, "MatMul"),
            event("/c/Attention_kernel_time", 2060 + 1000 * step, 20, "GroupQueryAttention"),
        )
    ),
]


def test_operators_are_summed_within_a_step() -> None:
    assert node_kernels(TRACE, 3, by_node=False) == (
        100,
        (Kernel("MatMul", 2.0, 40), Kernel("GroupQueryAttention", 1.0, 20)),
    )


def test_nodes_stand_alone() -> None:
    _, kernels = node_kernels(TRACE, 3, by_node=True)
    assert {kernel.name: kernel.us for kernel in kernels} == {
        "MatMul /a/MatMul": 30,
        "MatMul /b/MatMul": 10,
        "GroupQueryAttention /c/Attention": 20,
    }


def test_command_on_a_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="running a model needs ONNX Runtime")
    target = tmp_path / "profile.json"
    command = [sys.executable, "tools/profile_decode.py", "models/qwen2-tiny", "--steps", "4", "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    profile = json.loads(target.read_text())
    kernels = {kernel["name"]: kernel["calls"] for kernel in profile["kernels"]}
    assert kernels["GroupQueryAttention"] == 3  # one a layer
    assert profile["stats"]["decode_steps"] == 4 + 8
    assert "no_cuda_device" in done.stdout
