"""A plan: committed bytes of every layout and growth policy over context, and what follows from them.

Everything is arithmetic on `geometry.py`; nothing is measured, and a plan says nothing about speed beyond the order in
which layouts are preferred when they cost the same memory (plainer reads first: see docs/benchmarks).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx_kv.errors import CapacityError
from onnx_kv.geometry import CacheGeometry, GrowthPolicy, default_policy, next_bucket
from onnx_kv.layout import KvLayout
from onnx_kv.planning.source import ModelCache

_PLAINEST_FIRST = (KvLayout.SEQ_MAJOR, KvLayout.PAIRED, KvLayout.TOKEN_MAJOR)
_CLOSE = 1.25
"""A layout with plainer reads is recommended as long as it commits at most this many times the least."""


@dataclass(frozen=True)
class Assumptions:
    """What a plan was made for; every field is a knob, and reports list them all."""

    batch: int
    granule: int
    min_bucket: int
    contexts: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """One layout under one policy.

    `committed[i]` bytes back `contexts[i]` tokens a row; `moved[i]` bytes were copied by the growths on the way there.
    `floor` is what a single token commits; `longest` is the longest context a row that fits the memory, None where none
    was given.
    """

    layout: KvLayout
    policy: GrowthPolicy
    floor: int
    committed: tuple[int, ...]
    moved: tuple[int, ...]
    longest: int | None


@dataclass(frozen=True)
class Plan:
    """Costs of all layouts for one model.

    `crossover` and `shareable_from` are tokens, for each layout at a fixed stride.
    """

    model: ModelCache
    assumptions: Assumptions
    token_bytes: int
    costs: tuple[Cost, ...]
    crossover: dict[KvLayout, int | None]
    shareable_from: dict[KvLayout, int]
    recommended: KvLayout
    reason: str


def make_plan(
    model: ModelCache,
    *,
    contexts: Sequence[int],
    batch: int = 1,
    granule: int = 2 << 20,
    min_bucket: int = 256,
    memory: int | None = None,
) -> Plan:
    """Plan a model's cache for `contexts` tokens a row, `batch` rows and a device's `granule` in bytes.

    Args:
        model: the geometry.
        contexts: lengths to tabulate, in tokens a row.
        batch: sequences.
        granule: bytes that one mapping commits.
        min_bucket: smallest capacity of the bucket policies, in tokens.
        memory: bytes for the cache; the longest context that fits is found for it.

    Raises:
        CapacityError: a context is beyond the model's maximum.
    """
    for context in contexts:
        if not 1 <= context <= model.max_length:
            raise CapacityError(f"a context of {context} tokens is not between 1 and the maximum of {model.max_length}")
    asked = Assumptions(batch, granule, min_bucket, tuple(sorted(set(contexts))))
    geometries = {layout: CacheGeometry(layout, model.layers, model.element_size, batch) for layout in KvLayout}
    costs = tuple(_cost(geometries[layout], policy, model.max_length, asked, memory) for layout, policy in choices())
    recommended, reason = _recommend(costs, asked)
    return Plan(
        model=model,
        assumptions=asked,
        token_bytes=geometries[KvLayout.SEQ_MAJOR].token_bytes,
        costs=costs,
        crossover={layout: geometry.crossover(granule) for layout, geometry in geometries.items()},
        shareable_from={layout: geometry.shareable_from(granule) for layout, geometry in geometries.items()},
        recommended=recommended,
        reason=reason,
    )


def committed_bytes(
    geometry: CacheGeometry, policy: GrowthPolicy, length: int, max_length: int, min_bucket: int, granule: int
) -> int:
    """Bytes that back `length` tokens in every row under a policy, in whole granules where granules are mapped."""
    fixed = policy is GrowthPolicy.FIXED_STRIDE
    capacity = max_length if fixed else next_bucket(length, min_bucket, max_length)
    return geometry.physical_bytes(policy, capacity, [length] * geometry.batch, granule)


def moved_bytes(geometry: CacheGeometry, policy: GrowthPolicy, length: int, max_length: int, min_bucket: int) -> int:
    """Bytes that growths copy while every row goes from 1 to `length` tokens, each growth as late as it can be."""
    if policy is GrowthPolicy.FIXED_STRIDE:
        return 0
    return sum(
        geometry.moved_bytes(policy, [capacity] * geometry.batch)
        for capacity in _buckets(min_bucket, max_length)
        if capacity < length
    )


def choices() -> Iterator[tuple[KvLayout, GrowthPolicy]]:
    """Each layout's default policy, and head-major's other one: its granule per stripe is what the others avoid."""
    yield KvLayout.HEAD_MAJOR, GrowthPolicy.FIXED_STRIDE
    for layout in KvLayout:
        yield layout, default_policy(layout)


def _buckets(min_bucket: int, max_length: int) -> Iterator[int]:
    capacity = next_bucket(1, min_bucket, max_length)
    while capacity < max_length:
        yield capacity
        capacity = next_bucket(capacity + 1, min_bucket, max_length)


def _cost(
    geometry: CacheGeometry, policy: GrowthPolicy, max_length: int, asked: Assumptions, memory: int | None
) -> Cost:
    def committed(length: int) -> int:
        return committed_bytes(geometry, policy, length, max_length, asked.min_bucket, asked.granule)

    # Committed bytes never fall with the length, so the lengths that fit are a prefix of all lengths.
    lengths = range(1, max_length + 1)
    longest = None if memory is None else bisect.bisect_right(lengths, memory, key=committed)
    return Cost(
        layout=geometry.layout,
        policy=policy,
        floor=committed(1),
        committed=tuple(committed(context) for context in asked.contexts),
        moved=tuple(moved_bytes(geometry, policy, context, max_length, asked.min_bucket) for context in asked.contexts),
        longest=longest,
    )


def _recommend(costs: Sequence[Cost], asked: Assumptions) -> tuple[KvLayout, str]:
    """The plainest reads among layouts that move no byte and commit about the least at the shortest context."""
    still = {cost.layout: cost for cost in costs if cost.policy is GrowthPolicy.FIXED_STRIDE}
    least = min(still[layout].committed[0] for layout in _PLAINEST_FIRST)
    chosen = next(layout for layout in _PLAINEST_FIRST if still[layout].committed[0] <= _CLOSE * least)
    share = still[chosen].committed[0] / still[KvLayout.HEAD_MAJOR].committed[0]
    reason = (
        f"it grows without moving a byte and commits {share:.1%} of what head-major commits at a fixed stride for "
        f"{asked.contexts[0]:,} tokens"
    )
    if chosen is not KvLayout.SEQ_MAJOR:
        ratio = still[KvLayout.SEQ_MAJOR].committed[0] / still[chosen].committed[0]
        reason += f", {ratio:.3g} times less than seq-major"
    return chosen, reason
