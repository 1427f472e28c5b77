"""One configuration of a comparison and what its run left behind. A configuration runs in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
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
class Job:
    """What a configuration generates: `tokens` greedy ones after every prompt of each batch.

    With `arrays` it keeps the logits of every step and the cache, for which the host waits for every step.
    """

    configuration: Configuration
    batches: Sequence[Sequence[Sequence[int]]]
    tokens: int
    arrays: bool = True

    @property
    def longest(self) -> int:
        """The length of the longest row at its end."""
        return max(len(prompt) for batch in self.batches for prompt in batch) + self.tokens


@dataclass(frozen=True)
class Run:
    """What happened after one prompt.

    `logits` ([steps, vocabulary]) are what `tokens` were chosen from, `cache` is the row's keys and values afterwards,
    one array [kv_heads, tokens, head_dim] a layer and side. Both are empty where the job wanted no arrays.
    """

    tokens: list[int]
    logits: npt.NDArray[Any]
    cache: list[npt.NDArray[Any]]


@dataclass(frozen=True)
class Recording:
    """What a configuration did.

    `layout`, `passes` and `precision` are those of the graph that was loaded (`RuntimeModel`). There is a run for every
    prompt, in order, up to a `failure`, which says where the model's output was at fault.
    """

    layout: str
    passes: tuple[str, ...]
    precision: str
    runs: list[Run]
    stats: dict[str, Any]
    failure: str | None


def record(job: Job, folder: Path) -> Recording:
    """Run a configuration in a new process that writes into `folder`, which is made.

    Raises:
        ParityError: the configuration cannot run; the message has the process's own.
    """
    folder.mkdir()
    request = json.dumps(asdict(job) | {"folder": str(folder)})
    command = [sys.executable, "-m", "onnx_kv.parity.worker"]
    done = subprocess.run(command, input=request, capture_output=True, text=True)
    if done.returncode != 0:
        reason = done.stderr.strip() or f"its process ended with status {done.returncode}"
        configuration = job.configuration
        raise ParityError(f"configuration {configuration.name} ({configuration.directory}) could not run: {reason}")
    result = json.loads((folder / "result.json").read_text())
    tokens = iter(result.pop("tokens"))
    runs = [
        Run(said, *_arrays(folder / f"batch-{index}.npz", row, job))
        for index, batch in enumerate(job.batches)
        for row, said in zip(range(len(batch)), tokens, strict=False)
    ]
    return Recording(**result | {"passes": tuple(result["passes"]), "runs": runs})


def _arrays(file: Path, row: int, job: Job) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
    if not job.arrays:
        return np.empty(0), []
    with np.load(file) as arrays:
        cache = [key for key in arrays.files if key.startswith(f"cache-{row}-")]
        return _typed(arrays[f"logits-{row}"]), [_typed(arrays[key]) for key in cache]


def _typed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array as it was: only bfloat16 is stored as 16-bit numbers."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
