"""Calls of GroupQueryAttention to test with: a seed and a few choices make the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.gqa_reference import GqaAttributes, GqaInputs


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; `pasts` and `fresh` are tokens of each sequence before the call and new in it."""

    pasts: tuple[int, ...] = (5,)
    fresh: tuple[int, ...] = (3,)
    q_len: int = 3
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    room: int = 0


def make_call(
    shape: Shape,
    *,
    dtype: Any = np.float32,
    seed: int = 0,
    rotary_dim: int | None = None,
    bias: tuple[bool, bool] | None = None,
    sink: bool = False,
    norm: bool = False,
    positions: bool = False,
    query_seqlens: bool = False,
) -> GqaInputs:
    """Draw the arrays of a call.

    Args:
        shape: the sizes; `room` is free slots beyond the longest sequence.
        dtype: of all floats.
        seed: of the numbers.
        rotary_dim: width of the rotated part of a head; None for no rotary caches.
        bias: whether a bias differs by (sequence, head); None for no bias.
        sink: a sink for every query head.
        norm: weights of the query's and the key's norm.
        positions: position ids, which count from some other token than the cache does.
        query_seqlens: say how many tokens are new; needed where that is not min(q_len, total).
    """
    random = np.random.default_rng(seed)
    batch, heads = len(shape.pasts), shape.kv_heads * shape.group
    totals = np.add(shape.pasts, shape.fresh)
    capacity = int(max(totals)) + shape.room

    def normal(*dims: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(dims).astype(dtype)

    call = GqaInputs(
        query=normal(batch, shape.q_len, heads, shape.head_dim),
        key=normal(batch, shape.q_len, shape.kv_heads, shape.head_dim),
        value=normal(batch, shape.q_len, shape.kv_heads, shape.head_dim),
        seqlens_k=(totals - 1).astype(np.int32),
        capacity=capacity,
    )
    if max(shape.pasts) > 0:
        call.past_key = normal(batch, shape.kv_heads, capacity, shape.head_dim)
        call.past_value = normal(batch, shape.kv_heads, capacity, shape.head_dim)
    if rotary_dim is not None:
        angles = np.arange(capacity + 7)[:, None] * 100.0 ** -(np.arange(rotary_dim // 2) * 2 / rotary_dim)
        call.cos_cache, call.sin_cache = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    if bias is not None:
        dims = (batch if bias[0] else 1, heads if bias[1] else 1, shape.q_len, capacity)
        call.attention_bias = normal(*dims)
        call.attention_bias[random.random(dims) < 0.1] = -np.inf
    if sink:
        call.head_sink = normal(heads)
    if norm:
        call.q_norm_weight, call.k_norm_weight = normal(shape.head_dim), normal(shape.head_dim)
    if positions:
        starts = np.array(shape.pasts)[:, None] + random.integers(0, 7, (batch, 1))
        call.position_ids = np.minimum(starts + np.arange(shape.q_len), capacity + 6).astype(np.int64)
    if query_seqlens:
        call.query_seqlens = np.array(shape.fresh, np.int32)
    return call


def attributes(shape: Shape, **changes: Any) -> GqaAttributes:
    """The node's attributes for calls of this shape."""
    return GqaAttributes(shape.kv_heads * shape.group, shape.kv_heads, **changes)
