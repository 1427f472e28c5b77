"""Forced growth: the same batch in every layout and policy; tokens must be equal and counters must add up.

A small bucket makes the cache grow several times within a short text. Every row of the table is a process of its own;
layouts take turns. What each counter has to be follows from the geometry and the lengths alone, by the arithmetic of
`expected_counters`, which knows nothing of the runtime. Figures of memory are reported, not judged: they depend on the
granule.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx_kv.errors import ConfigError, ParityError
from onnx_kv.geometry import CacheGeometry, GrowthPolicy, next_bucket
from onnx_kv.layout import KvLayout
from onnx_kv.parity.configuration import Configuration, Job, Recording, record
from onnx_kv.parity.copies import patched_copy
from onnx_kv.parity.prompts import random_prompts
from onnx_kv.runtime.cache import DTYPES
from onnx_kv.runtime.graph import WARM_UP_RUNS
from onnx_kv.runtime.model import RuntimeModel

COUNTERS = ("growth_events", "kv_bytes_moved", "captures", "replays", "invalidations", "growth_keeps")
"""The counters that are judged."""

LAYOUTS = (KvLayout.HEAD_MAJOR, KvLayout.SEQ_MAJOR)
_DEFAULT_POLICY = {KvLayout.HEAD_MAJOR: GrowthPolicy.BUCKET, KvLayout.SEQ_MAJOR: GrowthPolicy.FIXED_STRIDE}


@dataclass(frozen=True)
class Case:
    """A row of the table. `min_bucket` is in tokens; one as large as the text ever gets means that nothing grows."""

    layout: KvLayout
    policy: GrowthPolicy
    min_bucket: int
    graph: bool

    @property
    def name(self) -> str:
        """The row's name."""
        policy = self.policy.value.replace("_", " ")
        return f"{self.layout.cli_name}, {policy}, from {self.min_bucket}, capture {'on' if self.graph else 'off'}"


@dataclass(frozen=True)
class Measured:
    """What a row's run counted beside what it has to be. `same_tokens` compares with the first row's."""

    case: Case
    same_tokens: bool
    counted: dict[str, int]
    expected: dict[str, int]
    physical_kv_bytes: int
    stats: dict[str, Any]

    @property
    def right(self) -> bool:
        """Whether tokens and every counter are as they have to be."""
        return self.same_tokens and self.counted == self.expected


@dataclass(frozen=True)
class GrowthReport:
    """The table, and every knob that was set."""

    rows: list[Measured]
    knobs: dict[str, Any]

    @property
    def right(self) -> bool:
        """Whether every row is."""
        return all(row.right for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types."""
        rows = [
            asdict(row) | {"case": row.case.name, "layout": row.case.layout.cli_name, "right": row.right}
            for row in self.rows
        ]
        return {"right": self.right, "knobs": self.knobs, "rows": rows}


def reproduce_growth(
    model_dir: str | Path,
    *,
    prompt_lengths: Sequence[int] = (5,),
    tokens: int = 48,
    min_bucket: int = 8,
    max_length: int = 512,
    device: str = "cpu",
    on_run: Callable[[str], object] | None = None,
) -> GrowthReport:
    """Run a model in every case and count.

    Args:
        model_dir: an exported model; temporary copies of it are patched, with sequence lengths as inputs.
        prompt_lengths: tokens of each row's prompt.
        tokens: tokens to generate for each row.
        min_bucket: tokens of the smallest bucket.
        max_length: most tokens a row may have.
        device: `cpu` (nothing is captured there), `cuda` or `cuda:N`.
        on_run: told the name of each case before it runs.

    Raises:
        ParityError: a case cannot run.
        ConfigError: the lengths do not fit.
        ModelDirError, MetadataError, PatchRefusedError: the directory cannot be read or patched.
    """
    model = RuntimeModel.open(model_dir)
    if not prompt_lengths or max(prompt_lengths) + tokens > max_length:
        raise ConfigError(f"prompts of {list(prompt_lengths)} and {tokens} tokens do not fit in {max_length}")
    prompts = random_prompts(model, prompt_lengths)
    measured: list[Measured] = []
    first: Recording | None = None
    with tempfile.TemporaryDirectory(prefix="onnx-kv-growth-") as name:
        folder = Path(name)
        copies = {x: patched_copy(model.directory.path, folder, x, lift_sequence_lengths=True) for x in LAYOUTS}
        longest = max(prompt_lengths) + tokens
        for case in cases(min_bucket, next_bucket(longest, min_bucket, max_length), capture=device != "cpu"):
            if on_run is not None:
                on_run(case.name)
            settings = {
                "device": device,
                "growth": case.policy.value,
                "min_bucket": case.min_bucket,
                "max_length": max_length,
                "graph": "on" if case.graph else "off",
            }
            configuration = Configuration(case.name, str(copies[case.layout]), settings=settings)
            run = record(Job(configuration, [prompts], tokens, arrays=False), folder / f"run-{len(measured)}")
            if run.failure is not None:
                raise ParityError(f"{case.name}: {run.failure}")
            first = first or run
            geometry = _geometry(model, case.layout, len(prompts))
            measured.append(
                Measured(
                    case=case,
                    same_tokens=[r.tokens for r in run.runs] == [r.tokens for r in first.runs],
                    counted={counter: run.stats[counter] for counter in COUNTERS},
                    expected=expected_counters(geometry, case, prompt_lengths, tokens, max_length),
                    physical_kv_bytes=run.stats["physical_kv_bytes"],
                    stats=run.stats,
                )
            )
    knobs = {
        "model": str(model_dir),
        "device": device,
        "prompt_lengths": list(prompt_lengths),
        "tokens": tokens,
        "min_bucket": min_bucket,
        "max_length": max_length,
    }
    return GrowthReport(measured, knobs)


def cases(min_bucket: int, enough: int, *, capture: bool) -> Iterator[Case]:
    """The rows of the table, layouts in turn. With `enough` tokens in the smallest bucket nothing grows."""
    for graph in (True, False) if capture else (False,):
        for bucket in (min_bucket, enough) if graph else (min_bucket,):
            for layout in LAYOUTS:
                yield Case(layout, _DEFAULT_POLICY[layout], bucket, graph)
    for layout in LAYOUTS:
        yield Case(layout, GrowthPolicy.REALLOC, min_bucket, graph=False)


def expected_counters(
    geometry: CacheGeometry, case: Case, prompt_lengths: Sequence[int], tokens: int, max_length: int
) -> dict[str, int]:
    """What a run has to count.

    The first token of `tokens` comes from the prompt, so there are `tokens - 1` steps; step i needs room for i tokens
    more than the prompt. Rows grow in step, so the longest one outgrows a bucket when it holds exactly the bucket.
    """
    longest, steps = max(prompt_lengths), tokens - 1
    outgrown = []
    bucket = next_bucket(longest, case.min_bucket, max_length)
    while bucket < longest + steps:
        outgrown.append(bucket)
        bucket = next_bucket(bucket + 1, case.min_bucket, max_length)
    moves = case.policy is not GrowthPolicy.FIXED_STRIDE
    token_bytes = geometry.token_bytes
    live = [sum(full - longest + length for length in prompt_lengths) for full in outgrown]
    # A stretch of steps between two moves is captured once it has had its warm-up runs.
    ends = [full - longest for full in outgrown] if moves else []
    stretches = [end - start for start, end in zip([0, *ends], [*ends, steps], strict=True)] if case.graph else []
    return {
        "growth_events": len(outgrown),
        "kv_bytes_moved": sum(live) * token_bytes if moves else 0,
        "captures": sum(stretch > WARM_UP_RUNS for stretch in stretches),
        "replays": sum(max(0, stretch - WARM_UP_RUNS) for stretch in stretches),
        "invalidations": sum(stretch > 0 for stretch in stretches),
        "growth_keeps": 0 if moves else len(outgrown),
    }


def _geometry(model: RuntimeModel, layout: KvLayout, batch: int) -> CacheGeometry:
    size = np.dtype(DTYPES[model.layers[0].dtype]).itemsize
    return CacheGeometry(layout, tuple(layer.shape for layer in model.layers), size, batch)
