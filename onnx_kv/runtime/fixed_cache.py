"""A cache of fixed capacity in plain host memory, behind the interface of the growing one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_kv.graph import CacheLayer
from onnx_kv.layout import KvLayout, Side, reservation_index, reservations, strides, token_offset, token_width
from onnx_kv.runtime.session import Binding


class KvCache:
    """Room for `capacity` tokens in each of `batch` rows. Bytes that were never written are NaN."""

    def __init__(self, layers: Sequence[CacheLayer], layout: KvLayout, batch: int, capacity: int) -> None:
        self.batch = batch
        self.layout = layout
        self.layers = layers
        self.capacity = capacity
        self._shapes = [layer.shape for layer in layers]
        self._item = np.dtype(layers[0].dtype).itemsize
        sizes = [0] * reservations(layout, self._shapes)
        for index in range(len(layers)):
            for side in Side:
                sizes[reservation_index(layout, index, side)] = token_width(layout, self._shapes, index)
        self._buffers = [np.full(batch * capacity * size * self._item, 0xFF, np.uint8) for size in sizes]

    def ensure(self, lengths: Sequence[int]) -> None:
        """Make room for `lengths[b]` tokens in row b: there is."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget tokens beyond `lengths[b]` of row b: a length is all there is to it."""

    def close(self) -> None:
        """Release the memory: the last reference does."""

    def signature(self) -> object:
        """What a bound run bakes in: every binding's address and shape."""
        return tuple((b.address, b.shape) for b in self.bindings())

    def bindings(self, row: int | None = None) -> tuple[Binding, ...]:
        """Key, then value, of each layer: of all rows, or of one as a batch of its own."""
        found = []
        for index, shape in enumerate(self._shapes):
            for side in Side:
                buffer = self._buffers[reservation_index(self.layout, index, side)]
                address = buffer.ctypes.data + token_offset(self.layout, self._shapes, index, side) * self._item
                if row is not None:
                    address += row * strides(self.layout, self._shapes, index, self.capacity).batch * self._item
                rows = self.batch if row is None else 1
                found.append(Binding(address, (rows, shape.kv_heads, self.capacity, shape.head_dim)))
        return tuple(found)
