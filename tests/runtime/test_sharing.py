"""Rows that start from another's tokens, against copies of what they should hold and a model of who maps what."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from onnx_kv.errors import CapacityError, ConfigError, DriverError, NativeError, OutOfMemoryError
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout, LayerShape
from onnx_kv.memory import MemoryBudget, MemoryPool
from onnx_kv.runtime.cache import KvCache
from tests.support.caches import Shadow

PAGE = 4096
MIB = 1 << 20
FIXED, BUCKET, REALLOC = GrowthPolicy
HEAD, SEQ, PAIRED, TOKEN = KvLayout
LAYERS = (LayerShape(2, 64), LayerShape(2, 32))
CAPACITY = 256


class Memory:
    """A pool and a budget, with caches that take from them."""

    def __init__(self, layout: KvLayout, limit: int = 1 << 40) -> None:
        self.layout = layout
        self.pool = MemoryPool()
        self.budget = MemoryBudget(limit, setting="--budget")
        self.caches: list[Shadow] = []

    def cache(self, batch: int = 1, policy: GrowthPolicy = FIXED, max_length: int = CAPACITY) -> Shadow:
        made = KvCache(
            LAYERS, self.layout, "float16", batch, max_length,
            policy=policy, min_bucket=1, commit_ahead=0, pool=self.pool, budget=self.budget,
        )  # fmt: skip
        self.caches.append(Shadow(made, seed=len(self.caches)))
        return self.caches[-1]

    def check(self) -> None:
        """Every cache holds what it should, and what is charged is what is mapped."""
        for shadow in self.caches:
            shadow.check()
        assert self.budget.held == self.pool.counters().committed_bytes


def start(target: Shadow, row: int, source: Shadow, tokens: int, source_row: int = 0) -> str | None:
    """Start a row and its shadow; return the reason for a copy."""
    begun = target.cache.start(row, source.cache, tokens, source_row)
    for mine, its in zip(target.values, source.values, strict=True):
        for here, there in zip(mine, its, strict=True):
            here[row, :, :tokens] = there[source_row, :, :tokens]
    target.lengths[row] = tokens
    assert begun.mapped_bytes + begun.copied_bytes == tokens * target.cache.geometry.token_bytes
    assert (begun.mapped_bytes == 0) == (begun.decline_reason is not None)
    return begun.decline_reason


def grow(shadow: Shadow, row: int, length: int) -> None:
    lengths = list(shadow.lengths)
    lengths[row] = length
    shadow.append(lengths)


def rewind(shadow: Shadow, row: int, length: int) -> None:
    lengths = list(shadow.lengths)
    lengths[row] = length
    shadow.rewind(lengths)


def fragments(layout: KvLayout) -> list[tuple[int, int]]:
    """(stripes a row, bytes a token of a stripe) of each reservation, on paper."""
    return {
        HEAD: [(2, 128), (2, 128), (2, 64), (2, 64)],
        SEQ: [(1, 256), (1, 256), (1, 128), (1, 128)],
        PAIRED: [(1, 512), (1, 256)],
        TOKEN: [(1, 768)],
    }[layout]


@pytest.mark.parametrize("layout", KvLayout)
@pytest.mark.parametrize("tokens", [32, 64, 77, 128, 200])
def test_whole_granules_are_charged_once(layout: KvLayout, tokens: int) -> None:
    memory = Memory(layout)
    prefix, rows = memory.cache(), memory.cache(batch=3)
    grow(prefix, 0, tokens)
    alone = memory.budget.held
    shareable = all(tokens * unit >= PAGE for _, unit in fragments(layout))
    whole = sum(stripes * (tokens * unit // PAGE) for stripes, unit in fragments(layout)) * shareable
    touched = sum(stripes * -(-tokens * unit // PAGE) for stripes, unit in fragments(layout))
    assert alone == touched * PAGE
    assert prefix.cache.geometry.shareable(tokens, PAGE) == shareable
    for row in range(3):
        reason = start(rows, row, prefix, tokens)
        assert (reason is None) == shareable
        assert shareable or str(reason).startswith("short_prefix")
        assert rows.cache.borrowed_bytes == whole * PAGE * (row + 1)
        assert rows.cache.physical_bytes == (touched - whole) * PAGE * (row + 1)
        assert memory.budget.held == alone + rows.cache.physical_bytes
    memory.check()
    for row in range(3):
        grow(rows, row, tokens + 20 * row + 1)
    memory.check()
    prefix.cache.close()
    memory.caches.remove(prefix)
    memory.check()
    rows.cache.close()
    assert memory.budget.held == memory.pool.counters().committed_bytes == 0


@pytest.mark.parametrize("layout", KvLayout)
def test_a_row_that_writes_into_its_prefix_gets_a_granule_of_its_own(layout: KvLayout) -> None:
    memory = Memory(layout)
    prefix, rows = memory.cache(), memory.cache(batch=2)
    grow(prefix, 0, 150)
    for row in range(2):
        assert start(rows, row, prefix, 150) is None
    signature, held = rows.cache.signature(), memory.budget.held
    rewind(rows, 0, 70)
    memory.check()
    assert memory.budget.held == held, "reading on costs nothing"
    grow(rows, 0, 71)
    memory.check()
    # The granules that hold token 70 become the row's own, and those behind it are given up; its ragged ends it has.
    lost = sum(stripes * (150 * unit // PAGE - 70 * unit // PAGE) for stripes, unit in fragments(layout))
    own = sum(stripes for stripes, unit in fragments(layout) if 70 * unit // PAGE < 150 * unit // PAGE)
    assert rows.cache.counters.detached_granules == lost
    assert memory.budget.held == held + own * PAGE
    assert rows.cache.signature() == signature
    for length in range(72, 200):
        grow(rows, 0, length)
    memory.check()
    grow(rows, 1, 190)
    memory.check()


@pytest.mark.parametrize("layout", KvLayout)
def test_the_row_that_others_started_from_may_write_too(layout: KvLayout) -> None:
    memory = Memory(layout)
    rows = memory.cache(batch=3)
    grow(rows, 0, 140)
    assert start(rows, 1, rows, 140) is None
    assert start(rows, 2, rows, 130, source_row=1) is None
    rewind(rows, 0, 3)
    grow(rows, 0, 180)
    memory.check()
    rewind(rows, 1, 0)
    grow(rows, 1, 50)
    memory.check()
    assert rows.cache.trim() > 0
    memory.check()


@pytest.mark.parametrize("layout", KvLayout)
def test_replaced_rows_leave_what_they_shared_alone(layout: KvLayout) -> None:
    memory = Memory(layout)
    prefix, rows = memory.cache(), memory.cache(batch=2)
    grow(prefix, 0, 150)
    start(rows, 0, prefix, 150)
    start(rows, 1, prefix, 140)
    values = [[np.ones((2, s.kv_heads, 90, s.head_dim), np.float16) for _ in range(2)] for s in LAYERS]
    rows.cache.write(values, [90, 60])  # type: ignore[arg-type]
    for mine, given in zip(rows.values, values, strict=True):
        for here, there in zip(mine, given, strict=True):
            here[:, :, :90] = there.view(np.uint16)
    rows.lengths = [90, 60]
    memory.check()


@pytest.mark.parametrize("layout", KvLayout)
@pytest.mark.parametrize(
    "policies", [pair for pair in itertools.product(GrowthPolicy, repeat=2) if pair != (FIXED,) * 2]
)
def test_buckets_start_from_a_copy_and_say_why(layout: KvLayout, policies: tuple[GrowthPolicy, GrowthPolicy]) -> None:
    memory = Memory(layout)
    prefix, rows = memory.cache(policy=policies[0]), memory.cache(batch=2, policy=policies[1])
    grow(prefix, 0, 150)
    for row in range(2):
        reason = start(rows, row, prefix, 150 - row)
        assert reason is not None
        assert reason.startswith("policy: ")
    grow(rows, 1, 200)
    assert rows.cache.counters.copied_starts == 2
    assert rows.cache.borrowed_bytes == rows.cache.counters.shared_starts == 0
    for shadow in memory.caches:
        shadow.check()


def test_what_cannot_be_mapped_is_copied_and_the_reason_told() -> None:
    memory, other = Memory(SEQ), Memory(SEQ)
    prefix = memory.cache()
    grow(prefix, 0, 100)
    assert str(start(other.cache(), 0, prefix, 100)).startswith("pool: ")
    other.pool = memory.pool
    assert str(start(other.cache(), 0, prefix, 100)).startswith("budget: ")
    uneven = memory.cache(batch=2, max_length=100)
    assert start(uneven, 0, prefix, 100) is None, "the first row of seq-major begins at a granule's edge anyway"
    assert str(start(uneven, 1, prefix, 100)).endswith("make max_length a multiple of 32")
    assert str(start(memory.cache(), 0, prefix, 31)).endswith("fill a granule of 4096 bytes in every stripe; 32 do")
    for shadow in (*memory.caches, *other.caches):
        shadow.check()


def test_what_a_row_cannot_start_from_is_refused() -> None:
    memory = Memory(SEQ)
    prefix, rows, paired = memory.cache(), memory.cache(batch=2), Memory(PAIRED).cache()
    grow(prefix, 0, 100)
    with pytest.raises(CapacityError, match="101 tokens of a row of 100"):
        rows.cache.start(0, prefix.cache, 101)
    with pytest.raises(CapacityError, match="0 tokens"):
        rows.cache.start(0, prefix.cache, 0)
    with pytest.raises(CapacityError, match="at most 50"):
        memory.cache(max_length=50).cache.start(0, prefix.cache, 100)
    with pytest.raises(ConfigError, match="same layers, layout"):
        paired.cache.start(0, prefix.cache, 100)
    grow(rows, 1, 4)
    with pytest.raises(ConfigError, match="row 1 has 4 tokens"):
        rows.cache.start(1, prefix.cache, 100)
    memory.check()


class Mappings:
    """Which granule each window of each cache maps, from the rules alone; `held` is what they charge."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.windows: dict[tuple[int, int, int], int] = {}  # (cache, reservation, window): granule
        self.names = itertools.count()

    @property
    def held(self) -> int:
        return len(set(self.windows.values())) * PAGE

    def touched(self, cache: int, row: int, start: int, end: int, whole: bool = False) -> list[tuple[int, int, int]]:
        """Windows of a row's tokens [start, end): those with a byte of them, or those wholly within."""
        found = []
        for reservation, (stripes, unit) in enumerate(fragments(self.memory.layout)):
            for stripe in range(row * stripes, (row + 1) * stripes):
                first, last = (stripe * CAPACITY + start) * unit, (stripe * CAPACITY + end) * unit
                edges = (-(-first // PAGE), last // PAGE) if whole else (first // PAGE, -(-last // PAGE))
                found += [(cache, reservation, window) for window in range(*edges)]
        return found

    def start(self, target: tuple[int, int], source: tuple[int, int], tokens: int) -> None:
        self.detach(*target, 0)
        if all(tokens * unit >= PAGE for _, unit in fragments(self.memory.layout)):
            here, there = (self.touched(*place, 0, tokens, whole=True) for place in (target, source))
            for window, origin in zip(here, there, strict=True):
                self.windows[window] = self.windows[origin]
        self.commit(*target, tokens)

    def grow(self, cache: int, row: int, old: int, new: int) -> None:
        if new > old:
            self.detach(cache, row, old)
            self.commit(cache, row, new)

    def commit(self, cache: int, row: int, length: int) -> None:
        for window in self.touched(cache, row, 0, length):
            if window not in self.windows:
                self.windows[window] = next(self.names)

    def detach(self, cache: int, row: int, start: int) -> None:
        """Give up every shared granule from a token on; the one with earlier tokens is replaced."""
        kept = set(self.touched(cache, row, 0, start))
        users = list(self.windows.values())
        for window in self.touched(cache, row, start, CAPACITY):
            granule = self.windows.get(window)
            if granule is not None and users.count(granule) > 1:
                users.remove(granule)
                del self.windows[window]
                if window in kept:
                    self.windows[window] = next(self.names)

    def trim(self, cache: int, lengths: Sequence[int]) -> None:
        kept = {window for row, length in enumerate(lengths) for window in self.touched(cache, row, 0, length)}
        self.windows = {key: value for key, value in self.windows.items() if key[0] != cache or key in kept}


@pytest.mark.parametrize("layout", KvLayout)
@pytest.mark.parametrize("seed", range(2))
def test_random_programs_against_private_copies(layout: KvLayout, seed: int) -> None:
    """Three caches of three rows start from each other, grow, rewind and trim; some driver calls fail."""
    memory = Memory(layout)
    model, rng = Mappings(memory), np.random.default_rng([layout, seed])
    caches = [memory.cache(batch=3) for _ in range(3)]
    for step in range(200):
        number, row = int(rng.integers(3)), int(rng.integers(3))
        shadow = caches[number]
        length = shadow.lengths[row]
        match rng.choice(["start", "grow", "rewind", "trim", "fail"], p=[0.3, 0.3, 0.25, 0.05, 0.1]):
            case "start":
                other, other_row = int(rng.integers(3)), int(rng.integers(3))
                most = caches[other].lengths[other_row]
                if most and (other, other_row) != (number, row):
                    tokens = int(rng.integers(1, most + 1))
                    rewind(shadow, row, 0)
                    start(shadow, row, caches[other], tokens, other_row)
                    model.start((number, row), (other, other_row), tokens)
            case "grow":
                new = int(rng.integers(length, CAPACITY + 1))
                grow(shadow, row, new)
                model.grow(number, row, length, new)
            case "rewind":
                rewind(shadow, row, int(rng.integers(0, length + 1)))
            case "trim":
                shadow.cache.trim()
                model.trim(number, shadow.lengths)
            case "fail":
                new = min(CAPACITY, length + 1)
                held = memory.budget.held
                memory.pool.fail_after(int(rng.integers(0, 8)))
                try:
                    shadow.cache.ensure([new if index == row else old for index, old in enumerate(shadow.lengths)])
                except DriverError:
                    assert memory.budget.held <= held
                memory.pool.fail_after(-1)
                shadow.cache.rewind(shadow.lengths)
                memory.check()
                grow(shadow, row, new)
                model.grow(number, row, length, new)
        if step % 5 == 0:
            memory.check()
        assert memory.budget.held == model.held
    memory.check()
    assert sum(shadow.cache.counters.shared_starts for shadow in caches) > 5
    assert sum(shadow.cache.counters.detached_granules for shadow in caches) > 5
    for shadow in caches:
        shadow.cache.close()
    assert memory.budget.held == memory.pool.counters().committed_bytes == 0


@pytest.mark.parametrize("layout", KvLayout)
def test_any_driver_call_of_a_start_may_fail(layout: KvLayout) -> None:
    failures, copies = 0, 0
    while True:
        memory = Memory(layout)
        prefix, rows = memory.cache(), memory.cache(batch=2)
        grow(prefix, 0, 150)
        grow(rows, 0, 60)
        rewind(rows, 0, 0)  # its memory has to make way
        memory.pool.fail_after(failures)
        try:
            reason = start(rows, 0, prefix, 150)
            passed = reason is None
            copies += not passed
            assert passed or str(reason).startswith("driver: injected failure")
        except DriverError:
            assert rows.cache.lengths == (0, 0)
            passed = False
        memory.pool.fail_after(-1)
        memory.check()
        if passed:
            break
        rewind(rows, 0, 0)
        assert start(rows, 0, prefix, 150) is None
        grow(rows, 0, 170)
        memory.check()
        failures += 1
    assert failures > copies > 3


@pytest.mark.parametrize("layout", KvLayout)
def test_any_driver_call_of_a_write_into_a_prefix_may_fail(layout: KvLayout) -> None:
    failures = 0
    while True:
        memory = Memory(layout)
        prefix, rows = memory.cache(), memory.cache(batch=2)
        grow(prefix, 0, 150)
        start(rows, 0, prefix, 150)
        start(rows, 1, prefix, 150)
        rewind(rows, 0, 70)
        memory.pool.fail_after(failures)
        try:
            rows.cache.ensure([100, 150])
            memory.pool.fail_after(-1)
            break
        except DriverError as error:
            if "cannot grow" not in str(error):
                assert "from token 70 on, which it shares" in str(error)  # noqa: PT017 - it depends on the call
        memory.pool.fail_after(-1)
        memory.check()
        rows.cache.trim()
        memory.check()
        grow(rows, 0, 100)
        memory.check()
        failures += 1
    assert failures > 8


@pytest.mark.parametrize("layout", KvLayout)
def test_a_refused_budget_leaves_a_row_that_shares_as_it_was(layout: KvLayout) -> None:
    memory = Memory(layout)
    prefix, row = memory.cache(), memory.cache()
    grow(prefix, 0, 150)
    start(row, 0, prefix, 150)
    memory.budget.limit = memory.budget.held
    rewind(row, 0, 70)
    with pytest.raises(OutOfMemoryError, match=r"row 0 cannot be written to from token 70 on.*raise --budget"):
        row.cache.ensure([71])
    memory.check()
    with pytest.raises(NativeError, match="raise --budget"):
        memory.cache().cache.start(0, prefix.cache, 150)
    memory.check()
    row.cache.close()
    memory.caches.remove(row)
    memory.check()


def test_eight_requests_on_a_shared_prefix_save_what_the_arithmetic_says() -> None:
    """48 layers of 8 heads of 128 in fp16, token-major: of 188 granules of 2,000 tokens, 187 are mapped 8 times."""
    pool, budget = MemoryPool(granule=2 * MIB), MemoryBudget(1 << 40)
    layers = (LayerShape(8, 128),) * 48
    with KvCache(
        layers, TOKEN, "float16", 8, 8192, min_bucket=1, commit_ahead=0, pool=pool, budget=budget
    ) as cache:  # fmt: skip
        cache.ensure([2000, *[0] * 7])
        assert budget.held == 188 * 2 * MIB
        for row in range(1, 8):
            begun = cache.start(row, cache, 2000)
            assert begun.decline_reason is None
            assert begun.mapped_bytes == 187 * 2 * MIB
        private = cache.geometry.physical_bytes(FIXED, 8192, [2000] * 8, 2 * MIB)
        assert private == 8 * 188 * 2 * MIB
        saved = private - budget.held
        assert saved == 7 * 187 * 2 * MIB == cache.borrowed_bytes == 7 * 2 * MIB * cache.geometry.shared_granules(
            2000, 2 * MIB
        )  # fmt: skip
        assert round(saved / (1 << 30), 2) == 2.56
        assert pool.counters().committed_bytes == budget.held == 195 * 2 * MIB
