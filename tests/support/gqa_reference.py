"""GroupQueryAttention in float64, written from the operator's documentation: the oracle for every kernel.

Nothing is tiled, fused or shared with the product: one loop over sequences, heads and query tokens. Caches are
*logical* arrays `[batch, kv_heads, capacity, head_dim]`; `cache_views` gives such an array over the bytes of a layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

LOWEST_FLOAT16 = -65504.0
"""A bias this low is a mask: such a pair has weight 0, also in a row where nothing else is left."""


@dataclass(frozen=True)
class GqaAttributes:
    """The node's attributes, spelled as in the graph (`scale` None: 1/sqrt(head_dim))."""

    num_heads: int
    kv_num_heads: int
    scale: float | None = None
    softcap: float = 0.0
    local_window_size: int = -1
    do_rotary: bool = False
    rotary_interleaved: bool = False
    smooth_softmax: bool = False
    q_norm_epsilon: float = 1e-6
    k_norm_epsilon: float = 1e-6


@dataclass
class GqaInputs:
    """One call. B sequences, S query tokens each (padding included), H query heads, N KV heads, head size D.

    Attributes:
        query: `[B, S, H, D]`.
        key: `[B, S, N, D]`, like `value`.
        past_key: `[B, N, C, D]` or None, like `past_value`; slots that are not live may hold anything.
        seqlens_k: `[B]`, tokens in the cache after the call, minus one.
        capacity: axis 2 of the present.
        query_seqlens: `[B]` or None, tokens of this call that are not padding.
        cos_cache: `[rows, rotary_dim / 2]`, like `sin_cache`.
        position_ids: `[B, S]` or None.
        attention_bias: `[B or 1, H or 1, S, at least max(T)]` or None; its last axis is the absolute key position.
        head_sink: `[H]` or None.
        q_norm_weight: `[D]` or None, like `k_norm_weight`.
    """

    query: Array
    key: Array
    value: Array
    seqlens_k: Array
    capacity: int
    past_key: Array | None = None
    past_value: Array | None = None
    query_seqlens: Array | None = None
    cos_cache: Array | None = None
    sin_cache: Array | None = None
    position_ids: Array | None = None
    attention_bias: Array | None = None
    head_sink: Array | None = None
    q_norm_weight: Array | None = None
    k_norm_weight: Array | None = None


@dataclass
class GqaOutputs:
    """`output` is `[B, S, H, D]`, float64, zero in padding rows; presents have the key's dtype, NaN where unwritten."""

    output: NDArray[np.float64]
    present_key: Array
    present_value: Array


def group_query_attention(node: GqaAttributes, call: GqaInputs) -> GqaOutputs:
    """Return what the operator documents for `call`. Keys are rounded to the cache's dtype before they are read."""
    batch, q_len, _, head_dim = call.query.shape
    cache_shape = (batch, node.kv_num_heads, call.capacity, head_dim)
    present_key = np.full(cache_shape, np.nan, dtype=call.key.dtype)
    present_value = np.full(cache_shape, np.nan, dtype=call.value.dtype)
    output = np.zeros((batch, q_len, node.num_heads, head_dim))
    for b in range(batch):
        total = int(np.reshape(call.seqlens_k, -1)[b]) + 1
        new = min(q_len, total) if call.query_seqlens is None else int(call.query_seqlens[b])
        past = total - new
        if past > 0:
            assert call.past_key is not None
            assert call.past_value is not None
            present_key[b, :, :past] = call.past_key[b, :, :past]
            present_value[b, :, :past] = call.past_value[b, :, :past]
        for s in range(new):
            position = past + s if call.position_ids is None else int(call.position_ids[b, s])
            for n in range(node.kv_num_heads):
                key = _normalize(call.key[b, s, n], call.k_norm_weight, node.k_norm_epsilon)
                present_key[b, n, past + s] = _rotate(node, call, key, position).astype(call.key.dtype)
                present_value[b, n, past + s] = call.value[b, s, n]
        for s in range(new):
            position = past + s if call.position_ids is None else int(call.position_ids[b, s])
            for h in range(node.num_heads):
                query = _normalize(call.query[b, s, h], call.q_norm_weight, node.q_norm_epsilon)
                query = _rotate(node, call, query, position)
                n = h // (node.num_heads // node.kv_num_heads)
                keys = present_key[b, n, : past + s + 1].astype(np.float64)
                values = present_value[b, n, : past + s + 1].astype(np.float64)
                output[b, s, h] = _attend_one(node, call, query, keys, values, b, s, h)
    return GqaOutputs(output, present_key, present_value)


def _attend_one(
    node: GqaAttributes,
    call: GqaInputs,
    query: NDArray[np.float64],
    keys: NDArray[np.float64],
    values: NDArray[np.float64],
    b: int,
    s: int,
    h: int,
) -> NDArray[np.float64]:
    """One query head of one token over the keys that causality leaves: itself (the last one) and all before it."""
    visible = len(keys)
    scores = keys @ query * (1 / math.sqrt(len(query)) if node.scale is None else node.scale)
    if node.softcap > 0:
        scores = node.softcap * np.tanh(scores / node.softcap)
    if call.attention_bias is not None:
        bias = call.attention_bias.astype(np.float64)
        bias = bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, s, :visible]
        scores = np.where(bias <= LOWEST_FLOAT16, -np.inf, scores + bias)
    if node.local_window_size > 0:
        scores[: max(0, visible - node.local_window_size)] = -np.inf
    sink = -np.inf
    if call.head_sink is not None:
        sink = float(call.head_sink[h])
    elif node.smooth_softmax:
        sink = 0.0
    peak = max(float(scores.max()), sink)
    if peak == -np.inf:
        return np.zeros(len(query))
    weights = np.exp(scores - peak)
    result: NDArray[np.float64] = weights @ values / (weights.sum() + np.exp(sink - peak))
    return result


def _normalize(vector: Array, weight: Array | None, epsilon: float) -> NDArray[np.float64]:
    """RMS norm of one head."""
    wide = vector.astype(np.float64)
    if weight is None:
        return wide
    result: NDArray[np.float64] = wide / np.sqrt(np.mean(wide * wide) + epsilon) * weight.astype(np.float64)
    return result


def _rotate(node: GqaAttributes, call: GqaInputs, vector: NDArray[np.float64], position: int) -> NDArray[np.float64]:
    """Rotary embedding of the first `rotary_dim` channels, in pairs (i, i + half) or (2i, 2i + 1)."""
    if not node.do_rotary:
        return vector
    assert call.cos_cache is not None
    assert call.sin_cache is not None
    cos = call.cos_cache[position].astype(np.float64)
    sin = call.sin_cache[position].astype(np.float64)
    half = len(cos)
    rotated = vector.copy()
    if node.rotary_interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    rotated[first] = vector[first] * cos - vector[second] * sin
    rotated[second] = vector[second] * cos + vector[first] * sin
    return rotated


def cache_shape(layout: int, batch: int, capacity: int, layers: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Physical axes of the array that holds a cache: of one binding (layouts 0, 1), one layer (2) or all layers (3)."""
    return {
        0: (batch, kv_heads, capacity, head_dim),
        1: (batch, capacity, kv_heads, head_dim),
        2: (batch, capacity, 2, kv_heads, head_dim),
        3: (batch, capacity, layers, 2, kv_heads, head_dim),
    }[layout]


def cache_view(storage: Array, layout: int, side: int = 0, layer: int = 0) -> Array:
    """A writable view `[batch, kv_heads, capacity, head_dim]` of one binding; side 0 is key, 1 is value."""
    match layout:
        case 0:
            return storage
        case 1:
            return storage.transpose(0, 2, 1, 3)
        case 2:
            return storage[:, :, side].transpose(0, 2, 1, 3)
        case 3:
            return storage[:, :, layer, side].transpose(0, 2, 1, 3)
    raise ValueError(f"no layout has the number {layout}")
