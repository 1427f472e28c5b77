"""The CUDA operator against the float64 reference, its layouts against each other, and captured replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_kv import cuda
from onnx_kv.errors import UnsupportedError
from onnx_kv.layout import KvLayout
from tests.support import cuda_gqa
from tests.support.gqa_reference import GqaAttributes, GqaInputs, GqaOutputs, group_query_attention

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def _same(found: GqaOutputs, expected: GqaOutputs, dtype: str, what: str = "") -> None:
    error = cuda_gqa.relative_error(found.output, expected.output)
    assert error < TOLERANCE[dtype], f"{what}: relative error of the output is {error:.2e}"
    for side in ("present_key", "present_value"):
        wanted, got = getattr(expected, side), getattr(found, side)
        live = ~np.isnan(wanted.astype(np.float32))
        assert np.array_equal(np.isnan(got.astype(np.float32)), ~live), f"{what}: {side} was written elsewhere, or not"
        error = cuda_gqa.relative_error(got[live], wanted[live])
        assert error < TOLERANCE[dtype], f"{what}: relative error of {side} is {error:.2e}"


def _check(node: GqaAttributes, call: GqaInputs, dtype: str, stream: cuda.Stream, what: str = "", **how: Any) -> None:
    """Right in head-major, and bit for bit the same in every other layout."""
    expected = group_query_attention(node, call)
    first = cuda_gqa.run(node, call, stream, layout=KvLayout.HEAD_MAJOR, **how)
    _same(first, expected, dtype, what)
    for layout in list(KvLayout)[1:]:
        if layout.interleaved and how.get("two_buffers"):
            continue
        other = cuda_gqa.run(node, call, stream, layout=layout, **how)
        np.testing.assert_array_equal(other.output, first.output, f"{what}: {layout.cli_name} differs from head-major")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [32, 40, 64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("q_len", [1, 5, 70])
def test_head_sizes(stream: cuda.Stream, dtype: str, head_dim: int, q_len: int) -> None:
    rng = np.random.default_rng(head_dim)
    node = GqaAttributes(4, 2, do_rotary=True)
    call = cuda_gqa.random_call(rng, dtype, node, head_dim, [0, 37, 150], q_len, rotary_dim=head_dim // 16 * 16)
    _check(node, call, dtype, stream)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (8, 1), (9, 1), (16, 1), (17, 1), (40, 1), (28, 4), (6, 6)])
@pytest.mark.parametrize("q_len", [1, 3])
def test_groups(stream: cuda.Stream, heads: tuple[int, int], q_len: int) -> None:
    node = GqaAttributes(*heads, do_rotary=True)
    call = cuda_gqa.random_call(np.random.default_rng(1), "float16", node, 64, [200, 11], q_len, rotary_dim=64)
    _check(node, call, "float16", stream)


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "packed": ({"do_rotary": True}, {"packed": True}),
    "two buffers": ({"do_rotary": True}, {"two_buffers": True}),
    "interleaved": ({"do_rotary": True, "rotary_interleaved": True}, {}),
    "partial rotary": ({"do_rotary": True}, {"rotary_dim": 48}),
    "partial interleaved": ({"do_rotary": True, "rotary_interleaved": True}, {"rotary_dim": 16}),
    "window": ({"local_window_size": 33}, {}),
    "window of one": ({"local_window_size": 1}, {}),
    "softcap": ({"softcap": 2.5}, {}),
    "scale": ({"scale": 0.3}, {}),
    "smooth": ({"smooth_softmax": True}, {}),
    "sink": ({}, {"sink": True}),
    "bias": ({}, {"bias": True}),
    "masks": ({}, {"bias": True, "masks": True}),
    "positions": ({"do_rotary": True}, {"positions": True}),
    "norm": ({"do_rotary": True}, {"norm": True}),
    "query lengths": ({"do_rotary": True}, {"query_seqlens": True}),
    "everything": (
        {"do_rotary": True, "local_window_size": 90, "softcap": 5.0},
        {
            "sink": True,
            "bias": True,
            "masks": True,
            "norm": True,
            "positions": True,
            "query_seqlens": True,
            "packed": True,
        },
    ),
}


def _featured(
    rng: np.random.Generator, dtype: str, feature: str, head_dim: int, pasts: list[int], q_len: int
) -> tuple[GqaAttributes, GqaInputs, dict[str, Any]]:
    attributes, extras = FEATURES[feature]
    node = GqaAttributes(6, 2, **attributes)
    rotary = extras.get("rotary_dim", head_dim // 16 * 16) if node.do_rotary else 0
    call = cuda_gqa.random_call(rng, dtype, node, head_dim, pasts, q_len, rotary_dim=rotary)
    kind, batch = call.query.dtype, len(pasts)
    if extras.get("sink"):
        call.head_sink = rng.standard_normal(6).astype(kind)
    if extras.get("bias"):
        call.attention_bias = rng.standard_normal((batch, 6, q_len, call.capacity)).astype(kind)
        if extras.get("masks"):
            mask = rng.random(call.attention_bias.shape) < 0.3
            call.attention_bias[mask] = -np.inf if dtype == "float16" else -65504.0
            call.attention_bias[0, 0] = -65504.0  # a head that sees nothing
    if extras.get("positions"):
        call.position_ids = rng.integers(0, call.capacity, (batch, q_len))
    if extras.get("norm"):
        call.q_norm_weight, call.k_norm_weight = (rng.random(head_dim).astype(kind) for _ in range(2))
    if extras.get("query_seqlens"):
        call.query_seqlens = rng.integers(0, q_len + 1, batch).astype(np.int32)
        call.seqlens_k = (np.array(pasts) + call.query_seqlens - 1).astype(np.int32)
    return node, call, {key: True for key in ("packed", "two_buffers") if extras.get(key)}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("feature", list(FEATURES))
@pytest.mark.parametrize("q_len", [1, 6, 40])
def test_features(stream: cuda.Stream, dtype: str, feature: str, q_len: int) -> None:
    rng = np.random.default_rng(list(FEATURES).index(feature))
    node, call, how = _featured(rng, dtype, feature, 64, [3, 130, 64], q_len)
    _check(node, call, dtype, stream, feature, **how)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_mix(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    feature = data.draw(st.sampled_from(list(FEATURES)))
    head_dim = data.draw(st.sampled_from([64, 72, 128, 256]))
    pasts = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    q_len = data.draw(st.sampled_from([1, 1, 2, 17, 64, 65]))
    node, call, how = _featured(rng, dtype, feature, head_dim, pasts, q_len)
    _check(node, call, dtype, cuda.Stream(), f"{feature}, {pasts}", **how)


def test_lengths_around_split_and_tile_boundaries(stream: cuda.Stream) -> None:
    """Lengths that begin, end or fill a tile or a split: in a batch, where the neighbours change nothing, and alone."""
    rng = np.random.default_rng(5)
    node = GqaAttributes(28, 4, do_rotary=True)
    edges = [1, 16, *(unit * count for unit in (96, 192) for count in (1, 2, 8, 9, 33, 34))]
    totals = sorted({edge + delta for edge in edges for delta in (-1, 0, 1) if edge + delta > 0})
    call = cuda_gqa.random_call(rng, "float16", node, 128, [total - 1 for total in totals], 1, rotary_dim=128)
    expected = group_query_attention(node, call)
    together = cuda_gqa.run(node, call, stream)
    _same(together, expected, "float16")
    for row in range(len(totals)):
        alone = cuda_gqa.run(node, _row(call, row), stream)
        error = cuda_gqa.relative_error(alone.output[0], expected.output[row])
        assert error < TOLERANCE["float16"], f"{totals[row]} tokens alone: {error:.2e}"
    for row in range(0, len(totals), 5):
        pair = _rows(call, [row, len(totals) - 1 - row])
        np.testing.assert_array_equal(cuda_gqa.run(node, pair, stream).output[0], together.output[row])


def _row(call: GqaInputs, row: int) -> GqaInputs:
    return _rows(call, [row])


def _rows(call: GqaInputs, pick: list[int]) -> GqaInputs:
    assert call.past_key is not None
    assert call.past_value is not None
    return GqaInputs(
        query=call.query[pick],
        key=call.key[pick],
        value=call.value[pick],
        seqlens_k=call.seqlens_k[pick],
        capacity=call.capacity,
        past_key=call.past_key[pick],
        past_value=call.past_value[pick],
        cos_cache=call.cos_cache,
        sin_cache=call.sin_cache,
    )


def test_prefill_lengths_around_tile_boundaries(stream: cuda.Stream) -> None:
    node = GqaAttributes(7, 1, do_rotary=True)
    for q_len in (2, 9, 10, 18, 19, 31, 32, 33, 63, 64, 65, 127, 128, 129):
        for past in (0, 1, 63, 64, 65):
            rng = np.random.default_rng(q_len)
            call = cuda_gqa.random_call(rng, "float16", node, 128, [past, past], q_len, rotary_dim=128)
            expected = group_query_attention(node, call)
            _same(cuda_gqa.run(node, call, stream), expected, "float16", f"{q_len} on {past}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [-1, 150])
def test_prefill_over_many_tiles(stream: cuda.Stream, dtype: str, head_dim: int, window: int) -> None:
    rng = np.random.default_rng(head_dim)
    node = GqaAttributes(7, 1, do_rotary=True, local_window_size=window)
    call = cuda_gqa.random_call(rng, dtype, node, head_dim, [0, 400, 1, 129], 300, rotary_dim=head_dim)
    _check(node, call, dtype, stream)


@pytest.mark.parametrize("layout", list(KvLayout))
def test_one_capture_is_right_for_every_length(stream: cuda.Stream, layout: KvLayout) -> None:
    """200 replays at lengths in any order, each against the uncaptured call, and every 20th against the reference."""
    rng = np.random.default_rng(6)
    node = GqaAttributes(14, 2, do_rotary=True)
    capacity = 2500
    call = cuda_gqa.random_call(rng, "float16", node, 64, [capacity - 1], 1, capacity=capacity, rotary_dim=64)
    with cuda_gqa.closing(cuda_gqa.prepare(node, call, stream, layout=layout)) as prepared:
        prepared.launch()
        stream.synchronize()
        with stream.capture() as capture:
            prepared.launch()
        for step, total in enumerate([1, 2, capacity, *rng.integers(1, capacity + 1, 197).tolist()]):
            call.seqlens_k = np.array([total - 1], np.int32)
            prepared.lengths.write(call.seqlens_k, stream)
            capture.graph.launch(stream)
            replayed = prepared.results()
            prepared.launch()
            np.testing.assert_array_equal(prepared.results().output, replayed.output, f"{total} tokens")
            if step % 20 == 0:
                call.past_key, call.past_value = replayed.present_key, replayed.present_value
                error = cuda_gqa.relative_error(replayed.output, group_query_attention(node, call).output)
                assert error < TOLERANCE["float16"], f"{total} tokens: {error:.2e}"


def test_runs_are_deterministic(stream: cuda.Stream) -> None:
    node = GqaAttributes(32, 8, do_rotary=True)
    call = cuda_gqa.random_call(np.random.default_rng(7), "float16", node, 128, [3000, 700], 1, rotary_dim=128)
    first = cuda_gqa.run(node, call, stream).output
    for _ in range(20):
        np.testing.assert_array_equal(cuda_gqa.run(node, call, stream).output, first)


@pytest.mark.parametrize("q_len", [1, 9])
@pytest.mark.parametrize("length", [-(2**31), -2, 10**6, 2**31 - 1])
def test_wild_lengths_never_fault(stream: cuda.Stream, q_len: int, length: int) -> None:
    node = GqaAttributes(8, 2, do_rotary=True, local_window_size=50)
    call = cuda_gqa.random_call(np.random.default_rng(8), "float16", node, 64, [90, 20], q_len, rotary_dim=64)
    call.seqlens_k = np.array([length, 19 + q_len], np.int32)
    call.query_seqlens = np.array([length, q_len], np.int32)
    call.position_ids = np.full((2, q_len), length, np.int64)
    results = cuda_gqa.run(node, call, stream)
    call.position_ids = np.clip(call.position_ids, 0, call.capacity - 1)
    alone = group_query_attention(node, _with(_row(call, 1), position_ids=call.position_ids[1:]))
    error = cuda_gqa.relative_error(results.output[1], alone.output[0])
    assert error < TOLERANCE["float16"]


def _with(call: GqaInputs, **fields: Any) -> GqaInputs:
    for name, value in fields.items():
        setattr(call, name, value)
    return call


def test_first_use_inside_a_capture_is_refused() -> None:
    stream = cuda.Stream()
    node = GqaAttributes(5, 1)
    call = cuda_gqa.random_call(np.random.default_rng(9), "float16", node, 104, [10], 1)
    with cuda_gqa.closing(cuda_gqa.prepare(node, call, stream)) as prepared:
        with pytest.raises(UnsupportedError, match="before capturing"), stream.capture():
            prepared.launch()
        prepared.launch()
        _same(prepared.results(), group_query_attention(node, call), "float16")
