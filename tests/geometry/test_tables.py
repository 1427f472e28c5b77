"""The published figures of two model shapes, each checked against arithmetic on paper."""

from __future__ import annotations

import pytest

from onnx_kv.geometry import CacheGeometry, GrowthPolicy, next_bucket
from onnx_kv.layout import KvLayout, LayerShape

MIB = 1 << 20
GRANULE = 2 * MIB
FIXED, BUCKET, REALLOC = GrowthPolicy.FIXED_STRIDE, GrowthPolicy.BUCKET, GrowthPolicy.REALLOC
HEAD, SEQ, PAIRED, TOKEN = KvLayout


def qwen14b(layout: KvLayout, batch: int = 1) -> CacheGeometry:
    return CacheGeometry(layout, (LayerShape(8, 128),) * 48, 2, batch)


def qwen05b(layout: KvLayout, batch: int = 1) -> CacheGeometry:
    return CacheGeometry(layout, (LayerShape(2, 64),) * 24, 2, batch)


@pytest.mark.parametrize(("layout", "granules"), [(HEAD, 768), (SEQ, 96), (PAIRED, 48), (TOKEN, 1)])
def test_floor_of_a_short_prefix_under_a_fixed_stride(layout: KvLayout, granules: int) -> None:
    assert qwen14b(layout).physical_bytes(FIXED, 8192, [1], GRANULE) == granules * GRANULE
    assert qwen14b(layout).physical_bytes(FIXED, 8192, [10], GRANULE) == granules * GRANULE


@pytest.mark.parametrize(
    ("geometry", "tokens"),
    [
        (qwen14b(HEAD), 8192),
        (qwen05b(HEAD), 16384),
        (qwen14b(SEQ), 1024),
        (qwen05b(SEQ), 8192),
        (qwen14b(PAIRED), 512),
        (qwen14b(TOKEN), None),
    ],
)
def test_crossover(geometry: CacheGeometry, tokens: int | None) -> None:
    assert geometry.crossover(GRANULE) == tokens


@pytest.mark.parametrize("capacity", [1024, 2048, 4096, 8192])
def test_a_packed_bucket_commits_the_same_in_head_major_and_seq_major(capacity: int) -> None:
    for layout in (HEAD, SEQ):
        committed = qwen14b(layout).physical_bytes(BUCKET, capacity, [5], GRANULE)
        assert committed == 96 * (capacity // 1024) * GRANULE


def test_forced_growth_moves_688128_bytes_in_head_major_and_none_in_seq_major() -> None:
    capacities = [8]
    while capacities[-1] < 53:
        capacities.append(next_bucket(capacities[-1] + 1, 8, 512))
    assert capacities == [8, 16, 32, 64]
    full = capacities[:-1]
    assert sum(qwen05b(HEAD).moved_bytes(BUCKET, [length]) for length in full) == 688_128
    assert sum(qwen05b(HEAD).moved_bytes(REALLOC, [length]) for length in full) == 688_128
    assert sum(qwen05b(SEQ).moved_bytes(REALLOC, [length]) for length in full) == 688_128
    assert sum(qwen05b(SEQ).moved_bytes(FIXED, [length]) for length in full) == 0


def test_forced_growth_physical_bytes() -> None:
    assert qwen05b(HEAD).physical_bytes(BUCKET, 64, [53], GRANULE) == 100_663_296
    assert qwen05b(SEQ).physical_bytes(FIXED, 512, [64], GRANULE) == 100_663_296
    assert qwen05b(HEAD).physical_bytes(REALLOC, 64, [53], GRANULE) == 786_432
    assert qwen05b(SEQ).physical_bytes(REALLOC, 64, [53], GRANULE) == 786_432
    assert qwen05b(HEAD).token_bytes == 12_288
    assert qwen05b(HEAD).reservation_bytes(0, 512) == 128 * 1024


def test_one_step_from_512_to_1024_tokens_on_14b() -> None:
    assert qwen14b(HEAD).moved_bytes(BUCKET, [512]) == 512 * 196_608 == 100_663_296
    assert qwen14b(SEQ).moved_bytes(FIXED, [512]) == 0


def test_token_major_holds_512_tokens_of_05b_in_three_granules() -> None:
    assert qwen05b(TOKEN).physical_bytes(FIXED, 32_768, [512], GRANULE) == 3 * GRANULE
    assert qwen05b(TOKEN).total_bytes(32_768) == 384 * MIB


@pytest.mark.parametrize(("layout", "tokens"), [(HEAD, 8192), (SEQ, 1024), (PAIRED, 512), (TOKEN, 11)])
def test_a_prefix_is_shareable_from(layout: KvLayout, tokens: int) -> None:
    geometry = qwen14b(layout)
    assert geometry.shareable_from(GRANULE) == tokens
    assert geometry.shareable(tokens, GRANULE)
    assert not geometry.shareable(tokens - 1, GRANULE)
    assert geometry.shared_granules(tokens, GRANULE) == geometry.reservations * geometry.stripes_per_row(0)
    assert geometry.shared_granules(tokens - 1, GRANULE) == 0


def test_eight_requests_on_a_2000_token_prefix_save_2_56_gib() -> None:
    saved = 7 * qwen14b(TOKEN).shared_granules(2000, GRANULE) * GRANULE
    assert saved == 7 * 187 * GRANULE
    assert round(saved / (1 << 30), 2) == 2.56
