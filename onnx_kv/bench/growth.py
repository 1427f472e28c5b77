"""What growth costs: every layout and policy grown token by token from the cache alone, one process a configuration.

A token's cost is the time of `KvCache.ensure` for it, with the copies it queued: mapping, re-striding, bookkeeping. No
model runs, so nothing is left to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onnx_kv.bench.process import run_worker
from onnx_kv.bench.result import Row
from onnx_kv.errors import CapacityError
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout
from onnx_kv.planning.plan import choices
from onnx_kv.planning.source import ModelCache


@dataclass(frozen=True)
class GrowthSettings:
    """What every configuration of a benchmark has in common. Bytes, and tokens a row.

    `granule` None is the device's own. `commit_aheads` are compared with each other.
    """

    device: str
    batch: int
    tokens: int
    min_bucket: int
    commit_aheads: tuple[int, ...]
    granule: int | None
    budget: int


@dataclass(frozen=True)
class GrowthCost:
    """One configuration: its times in microseconds, and what one run of it did.

    `times` has a row for the first token, which makes the first bucket; for the growths, each event a sample (absent
    where there was none); for the longest of the other tokens; and for the mean over all tokens.
    """

    name: str
    times: dict[str, Row]
    growth_events: int
    bytes_moved: int
    bytes_copied: int
    granules_mapped: int
    physical_bytes: int


FIRST, GROWTH, LONGEST, MEAN = "first token", "a growth", "longest other token", "mean token"


def bench_growth(
    model: ModelCache,
    settings: GrowthSettings,
    *,
    repeats: int,
    progress: Callable[[str], None] = lambda name: None,
) -> list[GrowthCost]:
    """Grow a cache of each layout, policy and commit-ahead `repeats` times, interleaved.

    Raises:
        CapacityError: more tokens than the model has room for.
        WorkerError: a run failed, for instance since its cache would have been over the budget.
    """
    if settings.tokens > model.max_length:
        raise CapacityError(f"{settings.tokens} tokens are more than the maximum of {model.max_length}")
    configurations = list(_configurations(settings))
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {configuration: [] for configuration in configurations}
    for repeat in range(repeats):
        for configuration in configurations:
            progress(f"{_name(*configuration)}, run {repeat + 1} of {repeats}")
            request = _request(model, settings, *configuration)
            runs[configuration].append(run_worker("onnx_kv.bench.growth_worker", request))
    return [
        _cost(_name(*configuration), runs[configuration], _request(model, settings, *configuration))
        for configuration in configurations
    ]


def _configurations(settings: GrowthSettings) -> Iterator[tuple[KvLayout, GrowthPolicy, int]]:
    for layout, policy in choices():
        for commit_ahead in settings.commit_aheads:
            yield layout, policy, commit_ahead
    yield KvLayout.HEAD_MAJOR, GrowthPolicy.REALLOC, 0  # plain memory is not committed ahead


def _name(layout: KvLayout, policy: GrowthPolicy, commit_ahead: int) -> str:
    ahead = "" if policy is GrowthPolicy.REALLOC else f", {commit_ahead} ahead"
    return f"{layout.cli_name} {policy}{ahead}"


def _request(
    model: ModelCache, settings: GrowthSettings, layout: KvLayout, policy: GrowthPolicy, commit_ahead: int
) -> dict[str, Any]:
    return {
        "layers": [[shape.kv_heads, shape.head_dim] for shape in model.layers],
        "dtype": model.dtype,
        "max_length": model.max_length,
        "layout": layout.cli_name,
        "policy": policy.value,
        "commit_ahead": commit_ahead,
        "device": settings.device,
        "batch": settings.batch,
        "tokens": settings.tokens,
        "min_bucket": settings.min_bucket,
        "granule": settings.granule,
        "budget": settings.budget,
    }


def _cost(name: str, runs: Sequence[dict[str, Any]], request: dict[str, Any]) -> GrowthCost:
    knobs = {key: value for key, value in request.items() if value is not None and key != "layers"}
    last = runs[-1]
    notes = [f"grows by copying instead: {last['decline_reason']}"] if last["decline_reason"] else []
    samples = {
        FIRST: [run["first_us"] for run in runs],
        GROWTH: [us for run in runs for us in run["growth_us"]],
        LONGEST: [max(run["other_us"]) for run in runs if run["other_us"]],
        MEAN: [(run["first_us"] + sum(run["growth_us"]) + sum(run["other_us"])) / request["tokens"] for run in runs],
    }
    return GrowthCost(
        name,
        {
            what: Row.of(f"{name}: {what}", "us", found, knobs=knobs, notes=notes)
            for what, found in samples.items()
            if found
        },
        last["growth_events"],
        last["bytes_moved"],
        last["bytes_copied"],
        last["maps"],
        last["physical_bytes"],
    )
