from __future__ import annotations

import pytest

from onnx_kv.errors import ConfigError
from onnx_kv.geometry import CacheGeometry, GrowthPolicy
from onnx_kv.layout import KvLayout, LayerShape
from onnx_kv.parity.growth import Case, cases, expected_counters, reproduce_growth
from tests.support.stock import MODELS

QWEN_05B = (LayerShape(2, 64),) * 24


def expected(layout: KvLayout, policy: GrowthPolicy, bucket: int, graph: bool) -> tuple[int, ...]:
    geometry = CacheGeometry(layout, QWEN_05B, 2, 1)
    return tuple(expected_counters(geometry, Case(layout, policy, bucket, graph), [5], 48, 512).values())


def test_what_the_table_of_the_qwen_shape_has_to_say() -> None:
    """Growth events, bytes moved, captures, replays, invalidations, keeps: worked out by hand."""
    moved = (8 + 16 + 32) * 12_288
    head, seq = KvLayout.HEAD_MAJOR, KvLayout.SEQ_MAJOR
    bucket, fixed, realloc = GrowthPolicy.BUCKET, GrowthPolicy.FIXED_STRIDE, GrowthPolicy.REALLOC
    assert moved == 688_128
    assert expected(head, bucket, 8, True) == (3, moved, 4, 39, 4, 0)
    assert expected(seq, fixed, 8, True) == (3, 0, 1, 45, 1, 3)
    assert expected(head, bucket, 64, True) == (0, 0, 1, 45, 1, 0)
    assert expected(seq, fixed, 64, True) == (0, 0, 1, 45, 1, 0)
    assert expected(head, bucket, 8, False) == (3, moved, 0, 0, 0, 0)
    assert expected(seq, fixed, 8, False) == (3, 0, 0, 0, 0, 3)
    assert expected(seq, realloc, 8, False) == (3, moved, 0, 0, 0, 0)


def test_layouts_take_turns_and_nothing_is_captured_without_a_device() -> None:
    assert [case.layout.cli_name for case in cases(8, 64, capture=True)] == ["head-major", "seq-major"] * 4
    assert [case.graph for case in cases(8, 64, capture=True)] == [True] * 4 + [False] * 4
    assert not any(case.graph for case in cases(8, 64, capture=False))


def test_every_counter_of_a_batch_adds_up_on_the_host() -> None:
    report = reproduce_growth(MODELS / "qwen2-tiny", prompt_lengths=(5, 3, 7))
    assert report.right, report.to_json()
    assert len(report.rows) == 4
    assert all(row.counted["growth_events"] == 3 for row in report.rows)


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[5\] and 48 tokens do not fit in 50"):
        reproduce_growth(MODELS / "qwen2-tiny", max_length=50)
