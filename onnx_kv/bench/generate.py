"""Tokens a second of whole generations: our decoder in several settings, and ONNX Runtime GenAI on the same weights.

Every run is a process of its own and configurations are interleaved. A row is never silently of a fallback: where no
graph was captured its notes say why, and where two configurations generated different tokens the result says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnx_kv.bench.process import run_worker
from onnx_kv.bench.result import Row

_LOWEST_TOKEN, _HIGHEST_TOKEN = 10, 256
"""Prompts are random ids from here: every vocabulary has them, and special tokens stand outside or do no harm."""


@dataclass(frozen=True)
class Configuration:
    """One configuration to measure: `settings` are the decoder's, or GenAI's where `rival` is set."""

    name: str
    model: Path
    settings: Mapping[str, Any]
    rival: bool = False


@dataclass
class _Runs:
    """What the runs of one configuration gave."""

    tokens: list[int] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


def bench_generate(
    configurations: Sequence[Configuration],
    *,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Measure each configuration `repeats` times, interleaved, on one random prompt.

    Returns rows of decode tokens a second, prefill milliseconds, and the longest step over the median step.

    Raises:
        WorkerError: a run failed.
    """
    prompt = np.random.default_rng(seed).integers(_LOWEST_TOKEN, _HIGHEST_TOKEN, prompt_tokens).tolist()
    runs = {configuration.name: _Runs() for configuration in configurations}
    for repeat in range(repeats):
        for configuration in configurations:
            progress(f"{configuration.name}, run {repeat + 1} of {repeats}")
            _run(configuration, prompt, new_tokens, runs[configuration.name])
    knobs = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "seed": seed}
    expected = runs[configurations[0].name].tokens
    return [
        row
        for configuration in configurations
        for row in _rows(configuration, runs[configuration.name], expected, knobs)
    ]


def _run(configuration: Configuration, prompt: list[int], new_tokens: int, runs: _Runs) -> None:
    request = {"model": str(configuration.model), "prompt": prompt, "new_tokens": new_tokens}
    if configuration.rival:
        result = run_worker("onnx_kv.bench.genai_worker", request | dict(configuration.settings))
    else:
        result = run_worker("onnx_kv.bench.decoder_worker", request | {"settings": dict(configuration.settings)})
    steps = result["step_seconds"]
    runs.tokens = result["tokens"]
    runs.tokens_per_second.append(len(steps) / sum(steps))
    runs.prefill_seconds.append(result["prefill_seconds"])
    runs.steps.extend(steps)
    runs.stats = result.get("stats", {})


def _rows(
    configuration: Configuration, runs: _Runs, expected: Sequence[int], knobs: Mapping[str, str | int | float | bool]
) -> list[Row]:
    knobs = {**knobs, **configuration.settings, "model": str(configuration.model)}
    notes = []
    if runs.stats.get("decline_reason"):
        notes.append(f"no captured graph: {runs.stats['decline_reason']}")
    if list(runs.tokens) != list(expected):
        first = next(i for i, pair in enumerate(zip(runs.tokens, expected, strict=False)) if pair[0] != pair[1])
        notes.append(f"tokens differ from the first configuration's from token {first} on")
    notes += [f"{name}={runs.stats[name]}" for name in _COUNTERS if name in runs.stats]
    # The first steps warm up and capture; they count in tokens a second and not as a boundary's cost.
    settled = runs.steps[len(runs.steps) // 8 :]
    median = statistics.median(settled)
    name = configuration.name
    return [
        Row.of(f"{name}: decode", "tokens/s", runs.tokens_per_second, higher_is_better=True, knobs=knobs, notes=notes),
        Row.of(f"{name}: median step", "us", [step * 1e6 for step in settled], knobs=knobs),
        Row.of(f"{name}: longest step", "× median", [max(settled) / median], knobs=knobs),
        Row.of(f"{name}: prefill", "ms", [seconds * 1e3 for seconds in runs.prefill_seconds], knobs=knobs),
    ]


_COUNTERS = (
    "captures",
    "replays",
    "invalidations",
    "growth_events",
    "growth_keeps",
    "kv_bytes_moved",
    "physical_kv_bytes",
    "reserved_kv_bytes",
)
