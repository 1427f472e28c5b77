from __future__ import annotations

import collections
import gc
import itertools

import numpy as np
import pytest

from onnx_kv.errors import CapacityError, ConfigError, DriverError, OutOfMemoryError, UnsupportedError
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout, LayerShape, Side
from onnx_kv.memory import MemoryBudget, MemoryPool
from onnx_kv.runtime.cache import KvCache
from tests.support.caches import Shadow, qwen05b

PAGE = 4096
MIB = 1 << 20
FIXED, BUCKET, REALLOC = GrowthPolicy
HEAD, SEQ, PAIRED, TOKEN = KvLayout
MIXED = (LayerShape(2, 64), LayerShape(1, 96), LayerShape(4, 32))
EVERY = list(itertools.product(KvLayout, GrowthPolicy))
MAPPED = [(layout, policy) for layout, policy in EVERY if policy is not REALLOC]


def make(layout: KvLayout, policy: GrowthPolicy, batch: int = 2, max_length: int = 100, **options: object) -> KvCache:
    options = {"min_bucket": 4, "commit_ahead": 8, "pool": MemoryPool(), **options}
    return KvCache(MIXED, layout, "float16", batch, max_length, policy=policy, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("layout", "policy"), EVERY)
def test_random_steps_against_a_shadow(layout: KvLayout, policy: GrowthPolicy) -> None:
    """840 steps for each of twelve pairs: 10,080 appends, rewinds, resets and trims, rows of different lengths."""
    shadow = Shadow(make(layout, policy, batch=3), seed=layout * 10 + list(GrowthPolicy).index(policy))
    rng = shadow.rng
    for step in range(840):
        lengths = shadow.lengths
        action = rng.choice(["token", "chunk", "rewind", "reset", "trim"], p=[0.7, 0.1, 0.14, 0.02, 0.04])
        if action == "token" and max(lengths) < 100:
            shadow.append([length + 1 for length in lengths])
        elif action == "chunk":
            shadow.append([int(rng.integers(length, min(100, length + 20) + 1)) for length in lengths])
        elif action == "rewind":
            shadow.rewind([int(rng.integers(0, length + 1)) for length in lengths])
        elif action == "reset":
            shadow.rewind([0] * 3)
        elif action == "trim":
            before = shadow.cache.physical_bytes
            assert shadow.cache.trim() == before - shadow.cache.physical_bytes
        if step % 16 == 0 or action in ("trim", "chunk"):
            shadow.check()
    shadow.check()


@pytest.mark.parametrize(
    ("layout", "policy", "min_bucket", "events", "moved", "keeps", "physical"),
    [
        (HEAD, BUCKET, 8, 3, 688_128, 0, 100_663_296),
        (SEQ, FIXED, 8, 3, 0, 3, 100_663_296),
        (HEAD, BUCKET, 64, 0, 0, 0, 100_663_296),
        (SEQ, FIXED, 64, 0, 0, 0, 100_663_296),
        (HEAD, REALLOC, 8, 3, 688_128, 0, 786_432),
        (SEQ, REALLOC, 8, 3, 688_128, 0, 786_432),
    ],
)
def test_forced_growth_counters(
    layout: KvLayout, policy: GrowthPolicy, min_bucket: int, events: int, moved: int, keeps: int, physical: int
) -> None:
    """48 tokens from a prompt of 5, as in the published table."""
    layers = qwen05b(layout).layers
    pool = MemoryPool(granule=2 * MIB)
    with KvCache(layers, layout, "float16", 1, 512, policy=policy, min_bucket=min_bucket, pool=pool) as cache:
        seen = [event for length in range(5, 54) if (event := cache.ensure([length])) is not None]
        assert [(event.old_capacity, event.new_capacity) for event in seen] == [(8, 16), (16, 32), (32, 64)][:events]
        assert sum(event.bytes_moved for event in seen) == cache.counters.bytes_moved == moved
        assert sum(event.kept for event in seen) == cache.counters.growth_keeps == keeps
        assert cache.counters.growth_events == events
        assert cache.physical_bytes == physical
        if policy is BUCKET:  # with two heads, the first of two stripes stays where it is
            assert cache.counters.bytes_copied * 2 == moved
    assert pool.counters().physical_bytes == 0


@pytest.mark.parametrize(("layout", "granules"), [(HEAD, 96), (SEQ, 48), (PAIRED, 24), (TOKEN, 1)])
def test_a_short_prefix_commits_the_floor_of_its_layout(layout: KvLayout, granules: int) -> None:
    """At a fixed stride of 32,768 tokens a head's stripe is two granules: layers · 2 · heads of them are touched."""
    pool = MemoryPool(granule=2 * MIB)
    layers = qwen05b(layout).layers
    with KvCache(layers, layout, "float16", 1, 32_768, policy=FIXED, min_bucket=8, commit_ahead=0, pool=pool) as cache:
        cache.ensure([5])
        assert cache.physical_bytes == granules * 2 * MIB
        assert cache.physical_bytes == cache.geometry.physical_bytes(FIXED, 32_768, [8], 2 * MIB)


@pytest.mark.parametrize(("layout", "policy"), EVERY)
@pytest.mark.parametrize("batch", [1, 3])
def test_committed_bytes_follow_the_arithmetic_at_every_step(
    layout: KvLayout, policy: GrowthPolicy, batch: int
) -> None:
    budget = MemoryBudget(1 << 40)
    cache = make(layout, policy, batch, min_bucket=1, commit_ahead=0, budget=budget)
    for length in range(1, 101):
        lengths = [max(0, length - 7 * row) for row in range(batch)]
        cache.ensure(lengths)
        expected = cache.geometry.physical_bytes(policy, cache.capacity, lengths, PAGE)
        assert cache.physical_bytes == budget.held == expected
    cache.close()
    assert budget.held == cache.physical_bytes == 0


@pytest.mark.parametrize(("layout", "policy"), EVERY)
def test_bindings_keep_bnsh_shapes_and_only_a_fixed_stride_keeps_the_signature(
    layout: KvLayout, policy: GrowthPolicy
) -> None:
    cache = make(layout, policy, batch=2)
    cache.ensure([3, 2])
    first = cache.signature()
    assert [b.shape for b in first] == [
        (2, shape.kv_heads, cache.capacity, shape.head_dim) for shape in MIXED for _ in Side
    ]
    for row in (0, 1):
        for part, whole in zip(cache.bindings(row), first, strict=True):
            assert part.shape == (1, *whole.shape[1:])
            assert (part.address == whole.address) == (row == 0)
    event = cache.ensure([9, 2])
    assert event is not None
    assert event.before == first
    assert event.after == cache.signature()
    assert event.kept == (first == cache.signature()) == (policy is FIXED)
    moved_pointers = [b.address for b in first] != [b.address for b in cache.signature()]
    assert moved_pointers == (policy is REALLOC)


@pytest.mark.parametrize(("layout", "policy"), EVERY)
def test_a_refused_budget_at_any_boundary_leaves_the_rows_usable(layout: KvLayout, policy: GrowthPolicy) -> None:
    free = MemoryBudget(1 << 40)
    sizes = set()
    with make(layout, policy, budget=free, commit_ahead=0) as probe:
        for length in range(1, 41):
            probe.ensure([length, length // 2])
            sizes.add(free.held)
    refusals = 0
    for limit in sorted(sizes):
        budget = MemoryBudget(limit, setting="--budget")
        try:
            shadow = Shadow(make(layout, policy, budget=budget, commit_ahead=0), seed=limit)
        except OutOfMemoryError:
            continue  # the smallest plain buffer is refused
        for length in range(1, 41):
            held, signature = shadow.cache.physical_bytes, shadow.cache.signature()
            try:
                shadow.append([length, length // 2])
            except OutOfMemoryError as error:
                refusals += 1
                assert "--budget" in str(error)  # noqa: PT017 - what is raised depends on the limit
                assert f"to {length} tokens" in str(error)  # noqa: PT017
                assert shadow.cache.physical_bytes == budget.held == held
                assert shadow.cache.signature() == signature
                shadow.check()
                lengths = shadow.lengths
                shadow.rewind([length // 2 for length in lengths])
                shadow.append(lengths)
                shadow.check()
                break
        shadow.cache.close()
        assert budget.held == 0
    assert refusals >= len(sizes) - 1  # with the largest, only a growth by copying is refused


@pytest.mark.parametrize(("layout", "policy"), MAPPED)
def test_any_driver_call_of_a_growth_or_trim_may_fail(layout: KvLayout, policy: GrowthPolicy) -> None:
    pool, budget = MemoryPool(), MemoryBudget(1 << 40)
    shadow = Shadow(make(layout, policy, pool=pool, budget=budget, commit_ahead=0), seed=5)
    shadow.append([30, 17])
    for step in ("grow", "trim"):
        held, failures = budget.held, 0
        while True:
            pool.fail_after(failures)
            try:
                if step == "grow":
                    shadow.cache.ensure([75, 40])
                else:
                    shadow.cache.trim()
                break
            except DriverError:
                pool.fail_after(-1)
            shadow.check()
            assert budget.held == pool.counters().committed_bytes == shadow.cache.physical_bytes
            assert step == "trim" or budget.held == held
            failures += 1
        pool.fail_after(-1)
        assert failures > 3
        if step == "grow":
            shadow.write_new([75, 40])
            shadow.check()
            shadow.rewind([9, 4])
    shadow.check()


@pytest.mark.parametrize(("layout", "policy"), MAPPED)
def test_what_was_never_written_is_never_copied(layout: KvLayout, policy: GrowthPolicy) -> None:
    """Granules come out of the pool full of NaN; after growth, the live tokens are exactly those written."""
    pool = MemoryPool()
    poison = pool.reserve(4 * MIB)
    pool.commit([poison.span()])
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * poison.nbytes).from_address(poison.address))[:] = 0xFF
    poison.close()
    shadow = Shadow(make(layout, policy, pool=pool), seed=3)
    for length in range(1, 101):
        shadow.append([length, max(0, length - 30)])
    shadow.check()
    assert pool.counters().creates == 4 * MIB // PAGE
    values = shadow.cache.read(1, Side.VALUE)
    assert values.shape == (2, 1, 100, 96)
    assert not np.isnan(values).any()
    assert not values[1, :, 70:].any()


def test_fifty_caches_leave_nothing_behind() -> None:
    pool, budget = MemoryPool(granule=2 * MIB), MemoryBudget(1 << 40)
    for number in range(50):
        layout, policy = EVERY[number % len(EVERY)]
        cache = make(layout, policy, pool=pool, budget=budget)
        cache.ensure([40, 2])
        if number % 2:
            cache.close()
        del cache
    gc.collect()
    assert budget.held == 0
    assert pool.counters().committed_bytes == pool.counters().reserved_bytes == 0
    pool.trim()
    assert pool.counters().physical_bytes == 0


@pytest.mark.parametrize(("layout", "policy"), MAPPED)
def test_a_boundary_finds_its_memory_mapped(layout: KvLayout, policy: GrowthPolicy) -> None:
    """Token by token, no step maps more than its share, although a boundary needs memory in every buffer."""
    cache = KvCache(
        (LayerShape(2, 64),) * 8, layout, "float16", 2, 4096, policy=policy, min_bucket=64, pool=MemoryPool()
    )
    cache.ensure([60, 50])
    assert cache.backing is not None
    maps = []
    for length in range(61, 1025):
        before = cache.backing.maps
        cache.ensure([length, length - 10])
        maps.append(cache.backing.maps - before)
    # A boundary needs 256 tokens · 4 KiB of one row, or 512 tokens of both, within 128 steps.
    assert cache.backing.maps >= 2048
    assert max(maps[128:]) <= (16 if policy is BUCKET else 8)


def test_commit_ahead_gives_way_to_the_budget_and_growth_reports_it() -> None:
    budget = MemoryBudget(30 * PAGE)
    shadow = Shadow(make(SEQ, FIXED, batch=1, budget=budget, commit_ahead=64, max_length=4000), seed=1)
    lengths = iter(range(1, 4000))
    with pytest.raises(OutOfMemoryError, match=r"cannot grow from \d+ to \d+ tokens .* refuses"):
        collections.deque((shadow.append([length]) for length in lengths), maxlen=0)
    shadow.check()


def test_without_virtual_memory_the_cache_grows_by_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> MemoryPool:
        raise UnsupportedError(f"{device} has no virtual memory management")

    monkeypatch.setattr(MemoryPool, "shared", refuse)
    shadow = Shadow(KvCache(MIXED, SEQ, "float16", 2, 100, min_bucket=4), seed=2)
    shadow.append([3, 3])
    shadow.append([50, 3])
    shadow.check()
    assert shadow.cache.decline_reason == "cpu has no virtual memory management"
    assert shadow.cache.backing is None
    assert shadow.cache.capacity == 64
    assert shadow.cache.counters.bytes_moved == 6 * shadow.cache.geometry.token_bytes


@pytest.mark.parametrize("layout", KvLayout)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_seeding_and_reading_speak_bnsh(layout: KvLayout, dtype: str) -> None:
    cache = KvCache(MIXED, layout, dtype, 2, 50, min_bucket=4, pool=MemoryPool())
    rng = np.random.default_rng(0)
    values = [
        tuple(rng.standard_normal((2, shape.kv_heads, 12, shape.head_dim)).astype(cache.dtype) for _ in Side)
        for shape in MIXED
    ]
    cache.ensure([20, 1])
    cache.write(values, [10, 12])  # type: ignore[arg-type]
    assert cache.lengths == (10, 12)
    for layer, pair in enumerate(values):
        for side, expected in zip(Side, pair, strict=True):
            found = cache.read(layer, side)
            assert found.shape == expected.shape
            np.testing.assert_array_equal(found[1], expected[1])
            np.testing.assert_array_equal(found[0, :, :10], expected[0, :, :10])
            assert not found[0, :, 10:].any()


def test_seeding_refuses_arrays_that_do_not_fit() -> None:
    cache = make(SEQ, FIXED)
    good = [tuple(np.ones((2, s.kv_heads, 5, s.head_dim), np.float16) for _ in Side) for s in MIXED]
    cache.write(good, [5, 5])  # type: ignore[arg-type]
    before = cache.read(0, Side.KEY)
    bad_dtype = [good[0], good[1], (good[2][0], good[2][1].astype(np.float32))]
    for values, lengths, reason in (
        (good[:2], [5, 5], "2 layers given"),
        (bad_dtype, [5, 5], r"value of layer 2 is float32\[2, 4, 5, 32\]"),
        (good, [6, 5], r"float16\[2, 2, 6, 64\] with that many"),
        (good[::-1], [5, 5], "key of layer 0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            cache.write(values, lengths)  # type: ignore[arg-type]
    np.testing.assert_array_equal(cache.read(0, Side.KEY), before)


def test_lengths_are_checked() -> None:
    cache = make(HEAD, BUCKET)
    cache.ensure([5, 6])
    with pytest.raises(CapacityError, match="101 tokens do not fit: the cache was made for at most 100"):
        cache.ensure([101, 6])
    with pytest.raises(ConfigError, match="2 rows"):
        cache.ensure([5])
    with pytest.raises(CapacityError, match=r"rows of \[5, 6\] tokens cannot be rewound to \[5, 7\]"):
        cache.rewind([5, 7])
    cache.ensure([1, 8])
    assert cache.lengths == (5, 8)
    with pytest.raises(ConfigError, match="int8 is not supported"):
        KvCache(MIXED, HEAD, "int8", 1, 10)
    with pytest.raises(ConfigError, match="at least 1"):
        KvCache(MIXED, HEAD, "float16", 1, 0)
    with pytest.raises(ConfigError, match="needs the stream"):
        KvCache(MIXED, HEAD, "float16", 1, 10, device="cuda")
    with pytest.raises(ConfigError, match="no device is called"):
        KvCache(MIXED, HEAD, "float16", 1, 10, device="tpu")


def test_a_reset_cache_keeps_its_memory_and_a_trimmed_one_gives_it_back() -> None:
    for layout, policy in MAPPED:
        pool = MemoryPool()
        cache = make(layout, policy, pool=pool)
        cache.ensure([90, 80])
        held, signature = cache.physical_bytes, cache.signature()
        cache.reset()
        assert cache.physical_bytes == held
        assert cache.signature() == signature
        assert cache.trim() == held
        assert cache.physical_bytes == pool.counters().physical_bytes == 0
        cache.ensure([3, 3])
        assert cache.physical_bytes > 0
