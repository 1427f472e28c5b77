"""The op library against ONNX Runtime's own operator, head-major, for everything that both can do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.gqa_cases import Shape, attributes, make_call
from tests.support.ort_gqa import Way, run_gqa

PREFILL = Shape((0, 0), (6, 6), 6, 2, 3, 32)
DECODE = Shape((40, 17), (1, 1), 1, 2, 3, 32)
CHUNK = Shape((40,), (9,), 9, 2, 3, 32)

# name: (node's attributes, inputs of the call)
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.4}, {}),
    "rotary": ({"do_rotary": True}, {"rotary_dim": 32}),
    "rotary interleaved": ({"do_rotary": True, "rotary_interleaved": True}, {"rotary_dim": 32}),
    "rotary partial": ({"do_rotary": True}, {"rotary_dim": 16}),
    "window": ({"local_window_size": 4}, {}),
    "softcap": ({"softcap": 3.0}, {}),
    "softcap and bias": ({"softcap": 3.0}, {"bias": (True, True)}),
    "smooth softmax": ({"smooth_softmax": True}, {}),
    "head sink": ({}, {"sink": True}),
    "bias": ({}, {"bias": (False, True)}),
    "bias for all": ({}, {"bias": (False, False)}),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [PREFILL, DECODE, CHUNK], ids=["prefill", "decode", "chunk"])
@pytest.mark.parametrize("feature", FEATURES)
def test_agrees(feature: str, shape: Shape, dtype: Any) -> None:
    changes, inputs = FEATURES[feature]
    node, call = attributes(shape, **changes), make_call(shape, dtype=dtype, **inputs)
    if call.attention_bias is not None:  # its own operator takes no row of which nothing is visible
        call.attention_bias[np.isinf(call.attention_bias)] = -3
    ours, stock = run_gqa(node, call, Way(0)), run_gqa(node, call, Way(None, library=False))
    tolerance = 1e-5 if dtype is np.float32 else 5e-3
    np.testing.assert_allclose(ours.output, stock.output, rtol=tolerance, atol=tolerance)
    for b, total in enumerate(call.seqlens_k + 1):
        for name in ("present_key", "present_value"):
            found, expected = (getattr(x, name)[b, :, :total].astype(np.float64) for x in (ours, stock))
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("two_buffers", [False, True])
def test_ways_to_pass_the_same_call(packed: bool, two_buffers: bool) -> None:
    node, call = attributes(CHUNK, do_rotary=True), make_call(CHUNK, rotary_dim=32)
    if two_buffers:
        assert call.past_key is not None
        assert call.past_value is not None
        call.past_key, call.past_value = call.past_key[:, :, :40], call.past_value[:, :, :40]
    ways = (Way(0, packed=packed, two_buffers=two_buffers), Way(None, packed, two_buffers, library=False))
    ours, stock = (run_gqa(node, call, way) for way in ways)
    np.testing.assert_allclose(ours.output, stock.output, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.present_key, stock.present_key, rtol=1e-5, atol=1e-5)


def test_position_ids() -> None:
    """Those of a decode; in a first prompt ONNX Runtime only reads the first of them."""
    node = attributes(DECODE, do_rotary=True)
    call = make_call(DECODE, rotary_dim=32, positions=True)
    ours, stock = run_gqa(node, call, Way(0)), run_gqa(node, call, Way(None, library=False))
    np.testing.assert_allclose(ours.output, stock.output, rtol=1e-5, atol=1e-5)


def test_right_padded_chunks() -> None:
    shape = Shape((40, 17, 30), (5, 9, 0), 9, 2, 3, 32, room=9)
    node, call = attributes(shape, do_rotary=True), make_call(shape, rotary_dim=32, query_seqlens=True)
    if "query_seqlens" not in stock_inputs():
        pytest.skip("this ONNX Runtime's operator has no query_seqlens")
    ours = run_gqa(node, call, Way(0, total=call.capacity))
    stock = run_gqa(node, call, Way(None, library=False, total=call.capacity))
    for b, fresh in enumerate(shape.fresh):
        np.testing.assert_allclose(ours.output[b, :fresh], stock.output[b, :fresh], rtol=1e-5, atol=1e-5)


def stock_inputs() -> list[str]:
    """Names of the inputs of ONNX Runtime's operator."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    return [x.name for op in get_all_operator_schema() if op.name == "GroupQueryAttention" for x in op.inputs]
