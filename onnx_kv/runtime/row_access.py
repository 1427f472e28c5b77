"""One row of one binding as a numpy array `[kv_heads, tokens, head_dim]`, whatever the layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.cuda import PitchedCopy
from onnx_kv.geometry import CacheGeometry
from onnx_kv.layout import KvLayout, Side
from onnx_kv.runtime.growth import Growth
from onnx_kv.runtime.transfer import Transfer


class RowAccess:
    """Copies live bytes of rows to and from the host. `memory` says where the cache lies at the moment."""

    def __init__(self, geometry: CacheGeometry, dtype: np.dtype[Any], transfer: Transfer) -> None:
        self._geometry = geometry
        self._dtype = dtype
        self._transfer = transfer

    def read(self, memory: Growth, layer: int, side: Side, row: int, length: int) -> npt.NDArray[Any]:
        """Return a copy of the row's first `length` tokens."""
        shape = self._geometry.layers[layer]
        packed = np.empty(length * shape.width, self._dtype)
        if length:
            address, pitch, width, height = self._block(memory, layer, side, row, length)
            self._transfer.read([PitchedCopy(packed.ctypes.data, width, address, pitch, width, height)])
        if self._geometry.layout is KvLayout.HEAD_MAJOR:
            return packed.reshape(shape.kv_heads, length, shape.head_dim)
        return packed.reshape(length, shape.kv_heads, shape.head_dim).swapaxes(0, 1)

    def write(self, memory: Growth, layer: int, side: Side, row: int, values: npt.NDArray[Any]) -> None:
        """Put `values` at the row's beginning."""
        length = values.shape[1]
        packed = np.ascontiguousarray(values if self._geometry.layout is KvLayout.HEAD_MAJOR else values.swapaxes(0, 1))
        if length:
            address, pitch, width, height = self._block(memory, layer, side, row, length)
            self._transfer.write([PitchedCopy(address, pitch, packed.ctypes.data, width, width, height)])

    def _block(self, memory: Growth, layer: int, side: Side, row: int, length: int) -> tuple[int, int, int, int]:
        """Address, pitch, width and height of the row's live bytes."""
        block = self._geometry.block(layer, side, row, memory.capacity, length)
        reservation, _ = self._geometry.binding(layer, side)
        return memory.addresses[reservation] + block.offset, block.pitch, block.width, block.height
