"""Calls that do not fit are errors, before anything is written: never a read or write out of range."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.gqa_cases import Shape, attributes, make_call
from tests.support.gqa_reference import GqaInputs
from tests.support.ort_gqa import Cache, Way, input_arrays, run_gqa

SHAPE = Shape((5, 2), (3, 3), 3, 2, 2, 16, room=4)


def full_call() -> GqaInputs:
    """A call with every input."""
    return make_call(SHAPE, rotary_dim=16, bias=(True, True), sink=True, norm=True, positions=True, query_seqlens=True)


def change(**values: Any) -> Callable[[GqaInputs], None]:
    """Set attributes of a call."""

    def apply(call: GqaInputs) -> None:
        for name, value in values.items():
            setattr(call, name, value)

    return apply


def position(value: int) -> Callable[[GqaInputs], None]:
    """Give the second sequence's last token another position."""

    def apply(call: GqaInputs) -> None:
        assert call.position_ids is not None
        call.position_ids[1, 2] = value

    return apply


# what is changed: words of the message
LENGTHS: dict[str, tuple[Callable[[GqaInputs], None], str]] = {
    "more tokens than room": (change(seqlens_k=np.array([7, 12])), "seqlens_k of sequence 1 is 12, .* room for 12"),
    "a very large length": (change(seqlens_k=np.array([2**31 - 1, 4])), "seqlens_k of sequence 0 is 2147483647"),
    "no token": (change(seqlens_k=np.array([-1, 4])), "seqlens_k of sequence 0 is -1"),
    "negative": (change(seqlens_k=np.array([-(2**31), 4])), "seqlens_k of sequence 0 is -2147483648"),
    "more new tokens than the chunk": (change(query_seqlens=np.array([3, 4])), "query_seqlens of sequence 1 is 4"),
    "more new tokens than the total": (
        change(seqlens_k=np.array([7, 1]), query_seqlens=np.array([3, 3])),
        "query_seqlens of sequence 1 is 3, expected 0 to 2",
    ),
    "negative new tokens": (change(query_seqlens=np.array([-1, 3])), "query_seqlens of sequence 0 is -1"),
    "position beyond the rotary caches": (position(19), "position_ids of sequence 1 is 19, but cos_cache has 19 rows"),
    "negative position": (position(-1), "position_ids of sequence 1 is -1"),
    "bias too short": (
        change(attention_bias=np.zeros((1, 1, 3, 7), np.float32)),
        r"attention_bias has shape \[1, 1, 3, 7\], expected \[1 or 2, 1 or 4, 3, 8 or more\]",
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_and_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply, message = LENGTHS[name]
    call = full_call()
    call.past_key, call.past_value = full_call().past_key, full_call().past_value
    apply(call)
    made: list[Cache] = []

    class Kept(Cache):
        """Past and present are filled for the call as it was before the change."""

        def put(self, side: int, past: Any, lengths: Any) -> None:
            self.view(side)[...] = 1
            made.append(self)

    monkeypatch.setattr("tests.support.ort_gqa.Cache", Kept)
    with pytest.raises(RuntimeError, match=f"GroupQueryAttention node 'attention': .*{message}"):
        run_gqa(attributes(SHAPE, do_rotary=True), call, Way(1, total=8))
    assert all((cache.view(side) == 1).all() for cache in made for side in (0, 1)), "the cache was written"


def test_last_position_without_position_ids() -> None:
    call = full_call()
    call.position_ids = None
    assert call.cos_cache is not None
    assert call.sin_cache is not None
    call.cos_cache, call.sin_cache = call.cos_cache[:7], call.sin_cache[:7]
    with pytest.raises(RuntimeError, match="the last position of sequence 0 is 7, but cos_cache has 7 rows"):
        run_gqa(attributes(SHAPE, do_rotary=True), call, Way(0))


def test_more_cached_tokens_than_the_past_holds() -> None:
    call = full_call()
    assert call.past_key is not None
    assert call.past_value is not None
    call.past_key, call.past_value = call.past_key[:, :, :4], call.past_value[:, :, :4]
    call.query_seqlens = np.array([3, 3])
    with pytest.raises(RuntimeError, match="leaves 5 tokens to past_key, which has room for 4"):
        run_gqa(attributes(SHAPE, do_rotary=True), call, Way(0, two_buffers=True, total=12))


def test_cached_tokens_without_a_past() -> None:
    call = full_call()
    call.past_key = call.past_value = None
    with pytest.raises(RuntimeError, match="leaves 5 tokens to past_key, which has room for 0"):
        run_gqa(attributes(SHAPE, do_rotary=True), call, Way(0, total=12))


@pytest.mark.parametrize("layout", [0, 1, 2, 3])
def test_total_beyond_a_shared_buffer(layout: int) -> None:
    """ONNX Runtime checks the bound output first; either way, nothing runs."""
    with pytest.raises(Exception, match=r"total_sequence_length|[Oo]utput|shape"):
        run_gqa(attributes(SHAPE, do_rotary=True), full_call(), Way(layout, total=13))


@pytest.mark.parametrize("total", [0, -3])
def test_total_that_is_no_length(total: int) -> None:
    with pytest.raises(RuntimeError, match=f"total_sequence_length is {total}"):
        run_gqa(attributes(SHAPE, do_rotary=True), full_call(), Way(0, total=total))


@pytest.mark.parametrize("layout", [2, 3])
def test_interleaved_layouts_need_one_buffer(layout: int) -> None:
    with pytest.raises(RuntimeError, match="past_key and present_key must be one buffer in an interleaved layout"):
        run_gqa(attributes(SHAPE, do_rotary=True), full_call(), Way(layout, two_buffers=True, total=12))


@pytest.mark.parametrize("stride", [1, 63])
def test_token_stride_too_small(stride: int) -> None:
    way = Way(2, attributes={"kv_token_stride": stride})
    with pytest.raises(RuntimeError, match=f"kv_token_stride of at least 64 elements, the node has {stride}"):
        run_gqa(attributes(SHAPE, do_rotary=True), full_call(), way)


WRONG_SHAPES = {
    "key": (2, 3, 2, 15),
    "value": (2, 3, 3, 16),
    "cos_cache": (19, 9),
    "sin_cache": (18, 8),
    "position_ids": (2, 2),
    "attention_bias": (3, 1, 3, 12),
    "head_sink": (3,),
    "q_norm_weight": (15,),
    "k_norm_weight": (1, 16),
    "query_seqlens": (1,),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_shapes(name: str) -> None:
    call = full_call()
    dims = WRONG_SHAPES[name]
    setattr(call, name, np.ones(dims, getattr(call, name).dtype))
    if name in ("key", "value"):  # as the node has them
        dims = (*dims[:2], dims[2] * dims[3])
    with pytest.raises(RuntimeError, match=re.escape(f"input {name} has shape [{', '.join(map(str, dims))}]")):
        run_gqa(attributes(SHAPE, do_rotary=True), call, Way(0))


def test_channels_that_heads_cannot_share() -> None:
    way = Way(0, attributes={"num_heads": 6})
    with pytest.raises(RuntimeError, match="query has 64 channels, which 6 query heads cannot share"):
        run_gqa(attributes(SHAPE, do_rotary=True), full_call(), way)


@pytest.mark.parametrize("dims", [[3], [1, 2], [2, 2]])
def test_lengths_of_another_batch(dims: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def arrays(call: GqaInputs, way: Way) -> dict[str, Any]:
        return input_arrays(call, way) | {"seqlens_k": np.ones(dims, np.int32)}

    monkeypatch.setattr("tests.support.ort_gqa.input_arrays", arrays)
    with pytest.raises(RuntimeError, match=re.escape(f"seqlens_k has shape {dims}, expected [2] or [2, 1]")):
        run_gqa(attributes(SHAPE, do_rotary=True), full_call(), Way(0))
