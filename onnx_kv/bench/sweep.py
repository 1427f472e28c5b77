"""The floor sweep: what a model's cache commits and moves, measured on real caches beside what the plan says.

No weights are needed: a geometry and `runtime/cache.py` are enough, on a GPU or on the host. Three parts:

- `pinned`: bucket caches whose smallest bucket is set to a capacity, holding a short prefix;
- `free`: every layout and policy growing through the contexts, with nothing set that commits more than it needs;
- `steps`: one token across a bucket's boundary, each layout in its default policy: what is moved, and whether bindings
  stay as they are.

Physical bytes are the memory backend's own count of mapped granules. Every cache has a pool of its own, and one
exists at a time. Where a knob, not the length, made a capacity, the figure says something about the knob: statements
on it are withheld (`Statement.withheld`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from onnx_kv.cuda import Stream, device_ordinal
from onnx_kv.errors import CapacityError, ConfigError
from onnx_kv.geometry import GrowthPolicy, default_policy, next_bucket
from onnx_kv.layout import KvLayout
from onnx_kv.memory import MemoryBudget, MemoryPool
from onnx_kv.planning.plan import choices, committed_bytes
from onnx_kv.planning.source import ModelCache
from onnx_kv.runtime.cache import KvCache

HOST_GRANULE = 2 << 20
"""Granule of the host's sweep unless asked otherwise: that of NVIDIA data-centre GPUs, so that the tables compare."""

_FREE_MIN_BUCKET, _FREE_COMMIT_AHEAD = 1, 0


@dataclass(frozen=True)
class SweepKnobs:
    """Everything that was set. Bytes, and tokens a row.

    `contexts` ascend, and the first is the short prefix of part `pinned`; `capacities` are that part's smallest
    buckets; `boundary` is the bucket that part `steps` outgrows.
    """

    device: str
    granule: int
    batch: int
    contexts: tuple[int, ...]
    capacities: tuple[int, ...]
    boundary: int
    budget: int

    def rows(self, length: int) -> list[int]:
        """The lengths of a batch whose rows all have `length` tokens."""
        return [length] * self.batch


@dataclass(frozen=True)
class Point:
    """Bytes that back `length` tokens a row in one cache, as planned and as the memory backend counted them."""

    layout: KvLayout
    policy: GrowthPolicy
    min_bucket: int
    length: int
    capacity: int
    planned: int
    measured: int
    pinned_by: str | None
    """The knob that made the capacity what it is, where the length did not."""


@dataclass(frozen=True)
class Step:
    """One token more than a bucket of `length` holds.

    `moved` live bytes lie in memory that the growth re-strides, and `copied` of them had to be copied: in place, each
    reservation's first stripe stays. `kept` says whether no binding changed, so that a captured graph stays valid.
    """

    layout: KvLayout
    policy: GrowthPolicy
    length: int
    planned_moved: int
    moved: int
    copied: int
    kept: bool


@dataclass(frozen=True)
class Statement:
    """What rows say when they are laid side by side; `withheld` is why that is no finding about layouts."""

    text: str
    withheld: str | None = None


@dataclass(frozen=True)
class Sweep:
    """The three parts of one sweep."""

    model: ModelCache
    knobs: SweepKnobs
    pinned: tuple[Point, ...]
    free: tuple[Point, ...]
    steps: tuple[Step, ...]

    @property
    def agrees(self) -> bool:
        """Whether every measured figure is the planned one."""
        points = all(point.planned == point.measured for point in (*self.pinned, *self.free))
        return points and all(step.planned_moved == step.moved for step in self.steps)

    def statements(self) -> list[Statement]:
        """One statement a group of rows that differ in nothing but the layout and its policy, in the parts' order."""
        short = self.knobs.contexts[0]
        groups = [[point for point in self.pinned if point.min_bucket == size] for size in self.knobs.capacities]
        groups.append([point for point in self.free if point.length == short])
        return [self._comparison(group) for group in groups] + [_crossing(step) for step in self.steps]

    def _comparison(self, points: Sequence[Point]) -> Statement:
        granules = ", ".join(
            f"{point.layout.cli_name} ({point.policy}) {point.measured // self.knobs.granule}" for point in points
        )
        knobs = {point.pinned_by for point in points} - {None}
        if not knobs:
            return Statement(f"granules of {points[0].length:,} tokens: {granules}")
        alike = "equal" if len({point.measured for point in points}) == 1 else "so"
        return Statement(
            f"smallest bucket {points[0].min_bucket:,}, granules of {points[0].length:,} tokens: {granules}",
            f"{', '.join(sorted(map(str, knobs)))} made these {alike}: a packed bucket commits its capacity in every "
            "layout, however few tokens it holds",
        )


def run_sweep(
    model: ModelCache,
    *,
    device: str = "cpu",
    granule: int | None = None,
    batch: int = 1,
    contexts: Sequence[int],
    capacities: Sequence[int],
    boundary: int,
    budget: int,
    progress: Callable[[str], None] = lambda name: None,
) -> Sweep:
    """Measure a geometry's caches; see the module for the parts.

    Args:
        model: the geometry, and the most tokens a row.
        device: `cpu`, `cuda` or `cuda:N`.
        granule: bytes; None for the device's own, and `HOST_GRANULE` on the host.
        batch: rows, all of the same length.
        contexts: tokens a row in part `free`; the smallest is also the prefix of part `pinned`.
        capacities: smallest buckets of part `pinned`.
        boundary: bucket that part `steps` outgrows.
        budget: bytes that one cache may hold; more is refused before it is asked for.
        progress: called with the name of each cache before it is measured.

    Raises:
        CapacityError: a context or capacity is beyond the model's maximum.
        ConfigError: the boundary is no bucket that can be outgrown.
        OutOfMemoryError: the budget or the device refused a cache.
    """
    for length in (*contexts, *capacities):
        if not 1 <= length <= model.max_length:
            raise CapacityError(f"{length} tokens are not between 1 and the maximum of {model.max_length}")
    if boundary >= model.max_length or next_bucket(boundary, 1, model.max_length) != boundary:
        raise ConfigError(
            f"a boundary of {boundary} tokens is no bucket that can be outgrown; it has to be a power of two below the "
            f"maximum of {model.max_length}"
        )
    if granule is None and device_ordinal(device) is None:
        granule = HOST_GRANULE
    granule = MemoryPool(device, granule).granule
    ascending = tuple(sorted(set(contexts)))
    knobs = SweepKnobs(device, granule, batch, ascending, tuple(sorted(set(capacities))), boundary, budget)
    bench = _Bench(model, knobs, progress)
    return Sweep(model, knobs, tuple(bench.pinned()), tuple(bench.free()), tuple(bench.steps()))


@dataclass(frozen=True)
class _Bench:
    """Makes the caches and reads them off."""

    model: ModelCache
    knobs: SweepKnobs
    progress: Callable[[str], None]

    def pinned(self) -> Iterator[Point]:
        for size in self.knobs.capacities:
            for layout in (KvLayout.HEAD_MAJOR, KvLayout.SEQ_MAJOR):
                with self._cache(layout, GrowthPolicy.BUCKET, size) as (cache, pool):
                    yield self._point(cache, pool, self.knobs.contexts[0], size)

    def free(self) -> Iterator[Point]:
        for layout, policy in choices():
            with self._cache(layout, policy, _FREE_MIN_BUCKET) as (cache, pool):
                for length in self.knobs.contexts:
                    yield self._point(cache, pool, length, _FREE_MIN_BUCKET)

    def steps(self) -> Iterator[Step]:
        boundary = self.knobs.boundary
        for layout in KvLayout:
            policy = default_policy(layout)
            with self._cache(layout, policy, _FREE_MIN_BUCKET) as (cache, _):
                cache.ensure(self.knobs.rows(boundary))
                event = cache.ensure(self.knobs.rows(boundary + 1))
                assert event is not None, "run_sweep checked that the boundary is a bucket's"
                planned = cache.geometry.moved_bytes(policy, self.knobs.rows(boundary))
                yield Step(layout, policy, boundary, planned, event.bytes_moved, event.bytes_copied, event.kept)

    def _point(self, cache: KvCache, pool: MemoryPool, length: int, min_bucket: int) -> Point:
        cache.ensure(self.knobs.rows(length))
        longest, policy, granule = self.model.max_length, cache.policy, self.knobs.granule
        bucketed = policy is not GrowthPolicy.FIXED_STRIDE
        pinned = bucketed and next_bucket(length, 1, longest) < cache.capacity
        return Point(
            cache.geometry.layout,
            policy,
            min_bucket,
            length,
            cache.capacity,
            committed_bytes(cache.geometry, policy, length, longest, min_bucket, granule),
            pool.counters().committed_bytes,
            f"min_bucket={min_bucket}" if pinned else None,
        )

    @contextlib.contextmanager
    def _cache(self, layout: KvLayout, policy: GrowthPolicy, min_bucket: int) -> Iterator[tuple[KvCache, MemoryPool]]:
        """A cache alone in its pool."""
        self.progress(f"{layout.cli_name}, {policy}, smallest bucket {min_bucket:,}")
        model, knobs = self.model, self.knobs
        pool = MemoryPool(knobs.device, knobs.granule)
        ordinal = device_ordinal(knobs.device)
        with contextlib.ExitStack() as stack:
            stream = None if ordinal is None else stack.enter_context(Stream(ordinal))
            cache = KvCache(
                model.layers,
                layout,
                model.dtype,
                knobs.batch,
                model.max_length,
                policy=policy,
                min_bucket=min_bucket,
                commit_ahead=_FREE_COMMIT_AHEAD,
                device=knobs.device,
                stream=stream,
                pool=pool,
                budget=MemoryBudget(knobs.budget, setting="--budget"),
            )
            yield stack.enter_context(cache), pool


def _crossing(step: Step) -> Statement:
    fate = (
        "bindings stay, a captured graph is kept" if step.kept else "bindings change, a captured graph is invalidated"
    )
    return Statement(
        f"{step.length:,} → {step.length + 1:,} tokens, {step.layout.cli_name} ({step.policy}): "
        f"{step.moved:,} bytes moved; {fate}"
    )
