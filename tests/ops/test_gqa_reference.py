"""The CPU operator against the float64 reference, over everything that a call may have."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gqa_cases import Shape, attributes, make_call
from tests.support.gqa_reference import GqaAttributes, GqaInputs, group_query_attention
from tests.support.ort_gqa import Way, past_lengths, run_gqa

# Largest error of an output against its values' size (about 1): rounding of the result and of the cached keys.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 4e-2}


def check(node: GqaAttributes, call: GqaInputs, way: Way) -> None:
    """Output, appended keys and values are right, and the live past is where it was, bit for bit."""
    found, expected = run_gqa(node, call, way), group_query_attention(node, call)
    tolerance = TOLERANCE[call.query.dtype.name]
    np.testing.assert_allclose(found.output, expected.output, rtol=tolerance, atol=tolerance)
    for b, (past, total) in enumerate(zip(past_lengths(call), np.asarray(call.seqlens_k) + 1, strict=True)):
        for name in ("present_key", "present_value"):
            live, wanted = getattr(found, name)[b, :, :total], getattr(expected, name)[b, :, :total]
            np.testing.assert_array_equal(live[:, :past], wanted[:, :past])
            np.testing.assert_allclose(
                live[:, past:].astype(np.float64), wanted[:, past:].astype(np.float64), rtol=tolerance, atol=tolerance
            )
            if not way.two_buffers:  # nothing is written beyond the live prefix
                assert np.isnan(getattr(found, name)[b, :, total:].astype(np.float64)).all()


@st.composite
def calls(draw: st.DrawFn) -> tuple[GqaAttributes, GqaInputs, Way]:
    """Any call that the operator takes."""
    batch = draw(st.integers(1, 3))
    q_len = draw(st.sampled_from([1, 1, 2, 5, 17]))
    query_seqlens = draw(st.booleans())
    pasts = tuple(draw(st.sampled_from([0, 1, 7, 126, 200])) for _ in range(batch))
    if query_seqlens:  # an idle sequence has a cache
        fresh = tuple(draw(st.integers(0 if past else 1, q_len)) for past in pasts)
    else:  # a sequence without a past may be shorter than the chunk
        fresh = tuple(q_len if past else draw(st.integers(1, q_len)) for past in pasts)
    head_dim = draw(st.sampled_from([8, 16, 20, 40, 64, 80]))
    shape = Shape(
        pasts,
        fresh,
        q_len,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        head_dim,
        draw(st.sampled_from([0, 1, 130])),
    )
    rotary_dim = draw(st.sampled_from([None, head_dim, head_dim // 2 // 2 * 2, 2]))
    smooth = draw(st.booleans())
    call = make_call(
        shape,
        dtype=draw(st.sampled_from([np.float32, np.float32, np.float16, ml_dtypes.bfloat16])),
        seed=draw(st.integers(0, 1 << 30)),
        rotary_dim=rotary_dim,
        bias=draw(st.one_of(st.none(), st.tuples(st.booleans(), st.booleans()))),
        sink=draw(st.booleans()),
        norm=draw(st.booleans()),
        positions=rotary_dim is not None and draw(st.booleans()),
        query_seqlens=query_seqlens,
    )
    node = attributes(
        shape,
        scale=draw(st.sampled_from([None, 0.3])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        local_window_size=draw(st.sampled_from([-1, -1, 1, 4, 129])),
        do_rotary=rotary_dim is not None,
        rotary_interleaved=rotary_dim is not None and draw(st.booleans()),
        smooth_softmax=smooth,
    )
    layout = draw(st.sampled_from([0, 1, 2, 3] if call.past_key is not None else [0, 1]))
    way = Way(
        layout,
        packed=draw(st.booleans()),
        two_buffers=layout < 2 and draw(st.booleans()),
        lengths_column=draw(st.booleans()),
        threads=draw(st.sampled_from([1, 2])),
        total=draw(st.sampled_from([None, call.capacity])),
    )
    if way.two_buffers and call.past_key is not None and call.past_value is not None:
        # Of its own length, as of an exporter's model that grows its cache by concatenation.
        longest = max(1, int(past_lengths(call).max()))
        call.past_key, call.past_value = call.past_key[:, :, :longest], call.past_value[:, :, :longest]
    total = int(max(np.add(pasts, fresh)))
    if way.total is None and (way.two_buffers or call.past_key is None):
        call.capacity = total
    return node, call, way


@settings(max_examples=150)
@given(calls())
def test_any_call(case: tuple[GqaAttributes, GqaInputs, Way]) -> None:
    check(*case)


LONG: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
    "prefill": (Shape((0,), (300,), 300, 1, 7, 64), {}, {"do_rotary": True}),
    "chunk on a past": (Shape((150, 40), (130, 130), 130, 2, 1, 32), {}, {"do_rotary": True}),
    "decode": (Shape((1000, 3), (1, 1), 1, 2, 7, 64), {}, {"do_rotary": True}),
    "window across tiles": (Shape((0,), (400,), 400, 1, 2, 16), {}, {"do_rotary": True, "local_window_size": 130}),
    "bias": (Shape((100,), (200,), 200, 1, 2, 16), {"bias": (True, True)}, {}),
}


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("name", LONG)
def test_long_calls(name: str, layout: int) -> None:
    shape, inputs, changes = LONG[name]
    rotary = {"rotary_dim": shape.head_dim} if changes.get("do_rotary") else {}
    check(attributes(shape, **changes), make_call(shape, **rotary, **inputs), Way(layout))


@pytest.mark.parametrize("mask", [-np.inf, -65504.0, np.finfo(np.float32).min])
def test_masked_pairs_weigh_nothing(mask: float) -> None:
    shape = Shape((6,), (3,), 3)
    call = make_call(shape)
    assert call.past_value is not None
    call.attention_bias = np.zeros((1, 1, 3, 9), np.float32)
    call.attention_bias[..., 2:5] = mask
    call.attention_bias[0, 0, 1, :] = mask
    found = run_gqa(attributes(shape), call, Way())
    assert not found.output[0, 1].any(), "a row without a visible key is zero"
    call.past_value[:, :, 2:5] = 1e30
    changed = run_gqa(attributes(shape), call, Way())
    np.testing.assert_array_equal(changed.output, found.output)


def test_scores_of_any_size_stay_finite() -> None:
    shape = Shape((40,), (1,), 1, head_dim=64)
    call = make_call(shape)
    call.query *= 1e4
    found = run_gqa(attributes(shape), call, Way())
    np.testing.assert_allclose(
        found.output, group_query_attention(attributes(shape), call).output, rtol=1e-3, atol=1e-3
    )


def test_half_precision_keeps_every_cached_value() -> None:
    """All finite float16 and bfloat16 values, subnormals too, survive the way through the kernel's floats."""
    for dtype in (np.float16, ml_dtypes.bfloat16):
        every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        values = every[np.isfinite(every.astype(np.float32))]
        values = np.resize(values, (1, len(values) // 64 + 1, 1, 64)).astype(dtype)
        shape = Shape((0,), (values.shape[1],), values.shape[1], 1, 1, 64)
        call = make_call(shape, dtype=dtype)
        # One visible key with weight 1: the output is the value, out of a float, rounded to the dtype.
        call.value = values
        found = run_gqa(attributes(shape, local_window_size=1), call, Way())
        np.testing.assert_array_equal(found.output[0, :, 0], values[0, :, 0].astype(np.float64))
