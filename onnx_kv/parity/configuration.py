"""One configuration of a comparison and what its run left behind. A configuration runs in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.errors import ParityError


@dataclass(frozen=True)
class Configuration:
    """What to run: a model directory, whose attention kernels, and settings of `onnx_kv.runtime.config` by name."""

    name: str
    directory: str
    stock: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """What a run of a configuration did, prompt by prompt.

    `layout` and `passes` are those of the graph that was loaded. `tokens[p]` are the greedy tokens after prompt p,
    `logits[p]` ([steps, vocabulary]) what they were chosen from, and `cache[p]` the live keys and values afterwards
    (one array [kv_heads, tokens, head_dim] a layer and side). `failure` says why the run ended early, where the
    model's output was at fault.
    """

    layout: str
    passes: tuple[str, ...]
    precision: str
    tokens: list[list[int]]
    logits: list[npt.NDArray[Any]]
    stats: dict[str, Any]
    failure: str | None


def record(configuration: Configuration, prompts: Sequence[Sequence[int]], tokens: int, folder: Path) -> Recording:
    """Run a configuration in a new process that writes into `folder`.

    Raises:
        ParityError: the configuration cannot run; the message has the process's own.
    """
    folder.mkdir()
    job = {"configuration": asdict(configuration), "prompts": prompts, "tokens": tokens, "folder": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "onnx_kv.parity.worker"], input=json.dumps(job), capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = done.stderr.strip() or f"its process ended with status {done.returncode}"
        raise ParityError(f"configuration {configuration.name} ({configuration.directory}) could not run: {reason}")
    result = json.loads((folder / "result.json").read_text())
    logits = [np.load(folder / f"logits-{index}.npy", mmap_mode="r") for index in range(len(result["tokens"]))]
    return Recording(**result | {"passes": tuple(result["passes"]), "logits": logits})
