"""Caches on the host, written to as a kernel would by arithmetic of the tests' own, and a shadow to compare with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.geometry import CacheGeometry
from onnx_kv.layout import KvLayout, LayerShape, Side
from onnx_kv.runtime.binding import Binding
from onnx_kv.runtime.cache import KvCache


def element_strides(cache: KvCache, binding: Binding) -> tuple[int, int, int, int]:
    """A binding's BNSH strides in elements, from the layouts' physical axes, spelled out here."""
    _, heads, capacity, dim = binding.shape
    width = {
        KvLayout.SEQ_MAJOR: heads * dim,
        KvLayout.PAIRED: 2 * heads * dim,
        KvLayout.TOKEN_MAJOR: sum(2 * shape.kv_heads * shape.head_dim for shape in cache.geometry.layers),
    }.get(cache.geometry.layout)
    return (heads * capacity * dim, capacity * dim, dim, 1) if width is None else (capacity * width, dim, width, 1)


def binding_view(cache: KvCache, binding: Binding) -> npt.NDArray[Any]:
    """A host binding as a strided BNSH array of unsigned integers; only committed parts of it may be touched."""
    strides, size = element_strides(cache, binding), cache.dtype.itemsize
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(binding.shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (span * size)).from_address(binding.address)
    raw = np.frombuffer(memoryview(memory), np.dtype(f"u{size}"))
    return np.lib.stride_tricks.as_strided(raw, binding.shape, [stride * size for stride in strides])


class Shadow:
    """A cache beside a copy of what it should hold: `values[layer][side]` is BNSH, its first `lengths` tokens live."""

    def __init__(self, cache: KvCache, seed: int) -> None:
        self.cache = cache
        self.rng = np.random.default_rng(seed)
        self.unsigned = np.dtype(f"u{cache.dtype.itemsize}")
        self.lengths = [0] * cache.batch
        self.values = [
            [np.zeros((cache.batch, shape.kv_heads, cache.max_length, shape.head_dim), self.unsigned) for _ in Side]
            for shape in cache.geometry.layers
        ]

    def append(self, lengths: Sequence[int]) -> None:
        """Grow the cache to `lengths`, and write the new tokens as a kernel does."""
        self.cache.ensure(lengths)
        self.write_new(lengths)

    def write_new(self, lengths: Sequence[int]) -> None:
        bindings = iter(self.cache.bindings())
        for sides in self.values:
            for values in sides:
                binding = next(bindings)
                for row, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)):
                    part = values[row, :, old:new]
                    part[:] = self.rng.integers(0, 0x7C00, part.shape, self.unsigned)  # finite in fp16
                    if new > old:
                        self.put(binding, row, old, part)
        self.lengths = [max(pair) for pair in zip(self.lengths, lengths, strict=True)]

    def put(self, binding: Binding, row: int, start: int, part: npt.NDArray[Any]) -> None:
        """Write `[heads, tokens, dim]` behind the first `start` tokens of a row of a host binding."""
        binding_view(self.cache, binding)[row, :, start : start + part.shape[1]] = part

    def rewind(self, lengths: Sequence[int]) -> None:
        self.cache.rewind(lengths)
        self.lengths = list(lengths)

    def check(self) -> None:
        """Assert that the cache holds exactly what it should."""
        assert list(self.cache.lengths) == self.lengths
        for layer, sides in enumerate(self.values):
            for side, values in zip(Side, sides, strict=True):
                for row, length in enumerate(self.lengths):
                    found = self.cache.read_row(layer, side, row).view(self.unsigned)
                    np.testing.assert_array_equal(found, values[row, :, :length])


def qwen05b(layout: KvLayout, batch: int = 1) -> CacheGeometry:
    """The cache of a 24-layer model with two KV heads of 64, in fp16."""
    return CacheGeometry(layout, (LayerShape(2, 64),) * 24, 2, batch)
