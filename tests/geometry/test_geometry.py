from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_kv.errors import CapacityError, ConfigError
from onnx_kv.geometry import (
    MAX_BYTES,
    ByteRange,
    CacheGeometry,
    GrowthPolicy,
    default_policy,
    granules_touched,
    next_bucket,
    next_commit,
    whole_granules,
)
from onnx_kv.layout import KvLayout, LayerShape, Side

SHAPES = st.lists(st.builds(LayerShape, st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3)


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    return CacheGeometry(
        draw(st.sampled_from(KvLayout)), tuple(draw(SHAPES)), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    )


@st.composite
def caches(draw: st.DrawFn) -> tuple[CacheGeometry, int, list[int]]:
    geometry = draw(geometries())
    capacity = draw(st.integers(1, 12))
    return (
        geometry,
        capacity,
        draw(st.lists(st.integers(0, capacity), min_size=geometry.batch, max_size=geometry.batch)),
    )


def element_bytes(geometry: CacheGeometry, capacity: int, lengths: list[int]) -> dict[int, set[int]]:
    """Bytes of every live element by reservation, from the physical axes spelled out in the layout's table."""
    found: dict[int, set[int]] = {index: set() for index in range(geometry.reservations)}
    everything = sum(2 * shape.width for shape in geometry.layers)
    for layer, shape in enumerate(geometry.layers):
        before = sum(2 * earlier.width for earlier in geometry.layers[:layer])
        for side in (0, 1):
            for row, length in enumerate(lengths):
                for head, token, dim in np.ndindex(shape.kv_heads, length, shape.head_dim):
                    match geometry.layout:
                        case KvLayout.HEAD_MAJOR:
                            index = 2 * layer + side
                            element = ((row * shape.kv_heads + head) * capacity + token) * shape.head_dim + dim
                        case KvLayout.SEQ_MAJOR:
                            index = 2 * layer + side
                            element = ((row * capacity + token) * shape.kv_heads + head) * shape.head_dim + dim
                        case KvLayout.PAIRED:
                            index = layer
                            element = (row * capacity + token) * 2 * shape.width + side * shape.width
                            element += head * shape.head_dim + dim
                        case KvLayout.TOKEN_MAJOR:
                            index = 0
                            element = (row * capacity + token) * everything + before + side * shape.width
                            element += head * shape.head_dim + dim
                    start = element * geometry.element_size
                    found[index].update(range(start, start + geometry.element_size))
    return found


@given(caches())
def test_live_ranges_are_exactly_the_bytes_of_live_elements(cache: tuple[CacheGeometry, int, list[int]]) -> None:
    geometry, capacity, lengths = cache
    expected = element_bytes(geometry, capacity, lengths)
    for index in range(geometry.reservations):
        ranges = geometry.live_ranges(index, capacity, lengths)
        assert ranges == sorted(ranges)
        assert {byte for start, end in ranges for byte in range(start, end)} == expected[index]
        assert max(expected[index], default=0) < geometry.reservation_bytes(index, capacity)


@given(caches())
def test_blocks_of_all_bindings_cover_the_live_bytes_once(cache: tuple[CacheGeometry, int, list[int]]) -> None:
    geometry, capacity, lengths = cache
    seen: dict[int, list[int]] = {index: [] for index in range(geometry.reservations)}
    for layer in range(len(geometry.layers)):
        for side in Side:
            index, _ = geometry.binding(layer, side)
            for row, length in enumerate(lengths):
                block = geometry.block(layer, side, row, capacity, length)
                for run in range(block.height):
                    start = block.offset + run * block.pitch
                    seen[index].extend(range(start, start + block.width))
    expected = element_bytes(geometry, capacity, lengths)
    assert {index: sorted(found) for index, found in seen.items()} == {k: sorted(v) for k, v in expected.items()}


@given(caches(), st.integers(1, 12))
def test_restriding_in_place_keeps_every_live_byte(cache: tuple[CacheGeometry, int, list[int]], other: int) -> None:
    geometry, capacity, lengths = cache
    lengths = [min(length, other) for length in lengths]
    for index in range(geometry.reservations):
        memory = np.zeros(geometry.reservation_bytes(index, max(capacity, other)), np.int64)
        before = geometry.live_ranges(index, capacity, lengths)
        content = np.arange(1, 1 + sum(end - start for start, end in before))
        memory[np.concatenate([np.arange(*r) for r in before] or [np.arange(0)])] = content
        copied = 0
        for source, destination, nbytes in geometry.moves(index, lengths, capacity, other):
            memory[destination : destination + nbytes] = memory[source : source + nbytes].copy()
            copied += nbytes
        after = geometry.live_ranges(index, other, lengths)
        assert np.concatenate([memory[start:end] for start, end in after] or [content]).tolist() == content.tolist()
        assert copied <= sum(end - start for start, end in before)
        if capacity == other or not geometry.restrides(index):
            assert copied == 0


@given(caches(), st.integers(0, 12))
def test_relocations_visit_the_same_stripes(cache: tuple[CacheGeometry, int, list[int]], more: int) -> None:
    geometry, capacity, lengths = cache
    for index in range(geometry.reservations):
        moves = geometry.relocations(index, lengths, capacity, capacity + more)
        assert [(m.source, m.source + m.nbytes) for m in moves] == geometry.live_ranges(index, capacity, lengths)
        grown = geometry.live_ranges(index, capacity + more, lengths)
        assert [(m.destination, m.destination + m.nbytes) for m in moves] == grown


@given(caches())
def test_moved_bytes_count_restrided_reservations_whole(cache: tuple[CacheGeometry, int, list[int]]) -> None:
    geometry, capacity, lengths = cache
    live = [sum(e - s for s, e in geometry.live_ranges(i, capacity, lengths)) for i in range(geometry.reservations)]
    restrided = [n for i, n in enumerate(live) if geometry.restrides(i)]
    assert geometry.moved_bytes(GrowthPolicy.REALLOC, lengths) == sum(live) == sum(lengths) * geometry.token_bytes
    assert geometry.moved_bytes(GrowthPolicy.BUCKET, lengths) == sum(restrided)


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 30)), max_size=6).map(
        lambda raw: [ByteRange(start, start + size) for start, size in sorted(raw)]
    ),
    st.integers(1, 16),
)
def test_granules_are_counted_once(ranges: list[ByteRange], granule: int) -> None:
    windows = {byte // granule for start, end in ranges for byte in range(start, end)}
    assert granules_touched(ranges, granule) == len(windows)
    whole = [(item, whole_granules([item], granule)) for item in ranges]
    assert whole_granules(ranges, granule) == [window for _, windows in whole for window in windows]
    for (start, end), windows in whole:
        inside = [
            w for w in range(start // granule, end // granule + 1) if start <= w * granule and (w + 1) * granule <= end
        ]
        assert [w for s, e in windows for w in range(s // granule, e // granule)] == inside


def test_bucket_capacities() -> None:
    assert [next_bucket(n, 8, 512) for n in (0, 1, 8, 9, 16, 17, 257, 512)] == [8, 8, 8, 16, 16, 32, 512, 512]
    assert next_bucket(300, 8, 400) == 400
    assert next_bucket(3, 1024, 512) == 512
    with pytest.raises(CapacityError, match=r"513 tokens .* at most 512"):
        next_bucket(513, 8, 512)


@given(st.integers(0, 1000), st.integers(1, 64), st.integers(1, 300))
def test_a_fixed_stride_commits_at_most_a_step_or_double(length: int, minimum: int, step: int) -> None:
    commit = next_commit(length, minimum, step, 1000)
    assert length <= commit <= 1000
    assert commit <= max(minimum, length + step, 8)
    assert commit <= next_bucket(length, minimum, 1000)


def test_fixed_stride_commits_double_then_go_by_steps() -> None:
    assert [next_commit(n, 8, 256, 4096) for n in (1, 9, 200, 257, 513, 769, 4000)] == [
        8, 16, 256, 512, 768, 1024, 4096,
    ]  # fmt: skip


def test_defaults() -> None:
    assert default_policy(KvLayout.HEAD_MAJOR) is GrowthPolicy.BUCKET
    for layout in (KvLayout.SEQ_MAJOR, KvLayout.PAIRED, KvLayout.TOKEN_MAJOR):
        assert default_policy(layout) is GrowthPolicy.FIXED_STRIDE


def test_what_cannot_be_indexed_is_refused() -> None:
    geometry = CacheGeometry(KvLayout.SEQ_MAJOR, (LayerShape(8, 128),), 2, 4)
    most = MAX_BYTES // (4 * 8 * 128 * 2)
    assert geometry.reservation_bytes(0, most) <= MAX_BYTES
    with pytest.raises(ConfigError, match="address space"):
        geometry.reservation_bytes(0, most + 1)
    with pytest.raises(ConfigError, match="address space"):
        geometry.live_ranges(0, most + 1, [1, 1, 1, 1])
    with pytest.raises(ConfigError, match="address space"):
        geometry.moves(0, [1, 1, 1, 1], 8, most + 1)


def test_lengths_beyond_the_capacity_are_refused() -> None:
    geometry = CacheGeometry(KvLayout.HEAD_MAJOR, (LayerShape(2, 4),), 2, 2)
    for call in (
        lambda: geometry.live_ranges(0, 8, [3, 9]),
        lambda: geometry.block(0, Side.KEY, 0, 8, 9),
        lambda: geometry.moves(0, [3, 9], 16, 8),
        lambda: geometry.live_ranges(0, 8, [-1, 2]),
    ):
        with pytest.raises(CapacityError, match="capacity of 8"):
            call()


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        CacheGeometry(KvLayout.HEAD_MAJOR, (), 2)
    with pytest.raises(ConfigError, match="at least one"):
        CacheGeometry(KvLayout.HEAD_MAJOR, (LayerShape(0, 4),), 2)


@settings(max_examples=50)
@given(geometries())
def test_a_token_takes_the_same_bytes_in_every_layout(geometry: CacheGeometry) -> None:
    for layout in KvLayout:
        twin = CacheGeometry(layout, geometry.layers, geometry.element_size, geometry.batch)
        assert twin.total_bytes(7) == 7 * geometry.batch * geometry.token_bytes
