"""Calls the CUDA operator by the flat C interface, without ONNX Runtime: for tests and benchmarks of its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from onnx_kv import cuda
from onnx_kv._native import function


class KvStrides(ctypes.Structure):
    """`ops/gqa/params.h`'s struct of this name."""

    _fields_ = (("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("seq", ctypes.c_int64))


class GqaParams(ctypes.Structure):
    """`ops/gqa/params.h`'s struct of this name."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("q_len", ctypes.c_int32),
        ("q_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("past_capacity", ctypes.c_int32),
        ("present_capacity", ctypes.c_int32),
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("query_token_stride", ctypes.c_int64),
        ("kv_token_stride", ctypes.c_int64),
        ("past_key", ctypes.c_void_p),
        ("past_value", ctypes.c_void_p),
        ("present_key", ctypes.c_void_p),
        ("present_value", ctypes.c_void_p),
        ("past", KvStrides),
        ("present", KvStrides),
        ("seqlens_k", ctypes.c_void_p),
        ("query_seqlens", ctypes.c_void_p),
        ("cos_cache", ctypes.c_void_p),
        ("sin_cache", ctypes.c_void_p),
        ("rotary_rows", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("rotary_interleaved", ctypes.c_bool),
        ("position_ids", ctypes.c_void_p),
        ("attention_bias", ctypes.c_void_p),
        ("bias_batch_stride", ctypes.c_int64),
        ("bias_head_stride", ctypes.c_int64),
        ("bias_row_stride", ctypes.c_int64),
        ("head_sink", ctypes.c_void_p),
        ("q_norm_weight", ctypes.c_void_p),
        ("k_norm_weight", ctypes.c_void_p),
        ("q_norm_epsilon", ctypes.c_float),
        ("k_norm_epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("smooth_softmax", ctypes.c_bool),
        ("output", ctypes.c_void_p),
    )


_launch: Callable[..., None] = function("onnx_kv_cuda_gqa", ctypes.c_int32, ctypes.c_uint64, ctypes.POINTER(GqaParams))


def launch(params: GqaParams, stream: cuda.Stream) -> None:
    """Queue one call on `stream`. Addresses in `params` are device addresses.

    Raises:
        ConfigError: an address or stride is not aligned.
        UnsupportedError: the head size has no kernel, or a first use falls into a capture.
    """
    _launch(stream.device, stream.handle, ctypes.byref(params))
