"""Runs the CUDA operator by the flat C call, on numpy arrays, in any cache layout: no ONNX Runtime, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnx_kv import cuda
from onnx_kv.layout import KvLayout, LayerShape, Side, strides, token_offset
from onnx_kv.ops.cuda_gqa import GqaParams, KvStrides, launch
from tests.support.gqa_reference import GqaAttributes, GqaInputs, GqaOutputs, cache_shape, cache_view

Array = NDArray[Any]

DTYPES: dict[str, tuple[int, Any]] = {
    "float32": (0, np.dtype(np.float32)),
    "float16": (1, np.dtype(np.float16)),
    "bfloat16": (2, np.dtype(ml_dtypes.bfloat16)),
}
LAYERS, LAYER = 3, 1
"""Of a token-major cache: how many layers share it, and which one a call works on."""


@dataclass
class Prepared:
    """A call whose arrays are on the device. `keep` holds every buffer, `present` the physical arrays of the cache."""

    params: GqaParams
    stream: cuda.Stream
    keep: list[cuda.Buffer]
    present: list[tuple[cuda.Buffer, tuple[int, ...]]]
    output: cuda.Buffer
    lengths: cuda.Buffer
    layout: KvLayout
    dtype: Any

    def launch(self) -> None:
        """Queue the call."""
        launch(self.params, self.stream)

    def results(self) -> GqaOutputs:
        """Wait, and return the output and the presents as logical arrays."""
        p = self.params
        output = cuda.copy_to_host(self.output, self.dtype, (p.batch, p.q_len, p.q_heads, p.head_dim), self.stream)
        caches = [cuda.copy_to_host(buffer, self.dtype, shape, self.stream) for buffer, shape in self.present]
        key, value = (cache_view(caches[side % len(caches)], self.layout, side, LAYER) for side in (0, 1))
        return GqaOutputs(output.astype(np.float64), key, value)


def prepare(
    node: GqaAttributes,
    call: GqaInputs,
    stream: cuda.Stream,
    *,
    layout: KvLayout = KvLayout.HEAD_MAJOR,
    packed: bool = False,
    two_buffers: bool = False,
) -> Prepared:
    """Put a call on the device. The cache beyond the past, its neighbours and the output are NaN."""
    batch, q_len, q_heads, head_dim = call.query.shape
    dtype = call.query.dtype
    name = next(name for name, (_, kind) in DTYPES.items() if kind == dtype)
    shape = LayerShape(node.kv_num_heads, head_dim)
    keep: list[cuda.Buffer] = []

    def put(array: Array) -> int:
        keep.append(cuda.copy_to_device(np.ascontiguousarray(array), stream))
        return keep[-1].address

    def optional(array: Array | None, kind: Any = dtype) -> int | None:
        return None if array is None else put(array.astype(kind))

    def cache(capacity: int, filled: bool) -> tuple[list[tuple[cuda.Buffer, tuple[int, ...]]], list[int], KvStrides]:
        """The physical arrays, both sides' addresses, and the strides."""
        physical = cache_shape(layout, batch, capacity, LAYERS, node.kv_num_heads, head_dim)
        arrays = [np.full(physical, np.nan, dtype) for _ in range(1 if layout.interleaved else 2)]
        if filled and call.past_key is not None and call.past_value is not None:
            for side, past in enumerate((call.past_key, call.past_value)):
                view = cache_view(arrays[side % len(arrays)], layout, side, LAYER)
                view[:, :, : past.shape[2]] = past
        put_all = [(put(array), keep[-1]) for array in arrays]
        layers = [shape] * LAYERS
        offsets = [token_offset(layout, layers, LAYER, side) * dtype.itemsize for side in Side]
        addresses = [put_all[side % len(arrays)][0] + offsets[side] for side in (0, 1)]
        s = strides(layout, layers, LAYER, capacity)
        return [(buffer, physical) for _, buffer in put_all], addresses, KvStrides(s.batch, s.head, s.seq)

    p = GqaParams(DTYPES[name][0], batch, q_len, q_heads, node.kv_num_heads, head_dim)
    p.present_capacity = call.capacity
    if packed:
        flat = [x.reshape(batch, q_len, -1) for x in (call.query, call.key, call.value)]
        p.query = put(np.concatenate(flat, axis=2))
        p.query_token_stride = p.kv_token_stride = sum(x.shape[2] for x in flat)
        p.key = p.query + flat[0].shape[2] * dtype.itemsize
        p.value = p.key + flat[1].shape[2] * dtype.itemsize
    else:
        p.query, p.key, p.value = put(call.query), put(call.key), put(call.value)
        p.query_token_stride, p.kv_token_stride = q_heads * head_dim, node.kv_num_heads * head_dim
    present, (p.present_key, p.present_value), p.present = cache(call.capacity, filled=not two_buffers)
    if two_buffers and call.past_key is not None:
        p.past_capacity = call.past_key.shape[2]
        _, (p.past_key, p.past_value), p.past = cache(p.past_capacity, filled=True)
    elif call.past_key is not None:
        p.past_capacity, p.past_key, p.past_value, p.past = call.capacity, p.present_key, p.present_value, p.present
    p.seqlens_k = put(call.seqlens_k.astype(np.int32).reshape(-1))
    lengths = keep[-1]
    p.query_seqlens = optional(call.query_seqlens, np.int32)
    if node.do_rotary:
        assert call.cos_cache is not None
        p.cos_cache, p.sin_cache = optional(call.cos_cache), optional(call.sin_cache)
        p.rotary_rows, p.rotary_dim = call.cos_cache.shape[0], 2 * call.cos_cache.shape[1]
        p.rotary_interleaved = node.rotary_interleaved
    p.position_ids = optional(call.position_ids, np.int64)
    if call.attention_bias is not None:
        p.attention_bias = optional(call.attention_bias)
        b, h, s, t = call.attention_bias.shape
        p.bias_row_stride, p.bias_head_stride, p.bias_batch_stride = t, s * t if h > 1 else 0, h * s * t if b > 1 else 0
    p.head_sink = optional(call.head_sink)
    p.q_norm_weight, p.k_norm_weight = optional(call.q_norm_weight), optional(call.k_norm_weight)
    p.q_norm_epsilon, p.k_norm_epsilon = node.q_norm_epsilon, node.k_norm_epsilon
    p.scale = 1 / math.sqrt(head_dim) if node.scale is None else node.scale
    p.softcap, p.window, p.smooth_softmax = node.softcap, node.local_window_size, node.smooth_softmax
    p.output = put(np.full((batch, q_len, q_heads, head_dim), np.nan, dtype))
    return Prepared(p, stream, keep, present, keep[-1], lengths, layout, dtype)


def run(node: GqaAttributes, call: GqaInputs, stream: cuda.Stream, **how: Any) -> GqaOutputs:
    """Run one call and return what it wrote; keywords are `prepare`'s."""
    prepared = prepare(node, call, stream, **how)
    prepared.launch()
    results = prepared.results()
    for buffer in prepared.keep:
        buffer.close()
    return results


def random_call(
    rng: np.random.Generator,
    dtype: str,
    node: GqaAttributes,
    head_dim: int,
    pasts: list[int],
    q_len: int,
    *,
    capacity: int | None = None,
    rotary_dim: int = 0,
) -> GqaInputs:
    """Random inputs: row b has `pasts[b]` tokens in the cache and adds `q_len`; NaN in slots that are not live."""
    kind = DTYPES[dtype][1]
    batch, longest = len(pasts), max(pasts) + q_len
    capacity = capacity or longest + 3

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(kind)

    past_key, past_value = (normal(batch, node.kv_num_heads, capacity, head_dim) for _ in range(2))
    for row, past in enumerate(pasts):
        past_key[row, :, past:] = np.nan
        past_value[row, :, past:] = np.nan
    call = GqaInputs(
        query=normal(batch, q_len, node.num_heads, head_dim),
        key=normal(batch, q_len, node.kv_num_heads, head_dim),
        value=normal(batch, q_len, node.kv_num_heads, head_dim),
        seqlens_k=np.array(pasts, np.int32) + q_len - 1,
        capacity=capacity,
        past_key=past_key,
        past_value=past_value,
    )
    if rotary_dim:
        angles = np.arange(capacity)[:, None] * 10000.0 ** -(np.arange(rotary_dim // 2) / (rotary_dim // 2))
        call.cos_cache, call.sin_cache = np.cos(angles).astype(kind), np.sin(angles).astype(kind)
    return call


@contextmanager
def closing(prepared: Prepared) -> Iterator[Prepared]:
    """Release a call's buffers at the end."""
    try:
        yield prepared
    finally:
        for buffer in prepared.keep:
            buffer.close()


def relative_error(found: Array, expected: Array) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; NaN if anything is."""
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - wide) / max(np.linalg.norm(wide), 1e-30))
