"""Memory of fixed size on a device: what a cache grows by copying where it cannot, or shall not, grow in place."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Self

import numpy as np

from onnx_kv import cuda
from onnx_kv.memory import MemoryBudget

_ALIGNMENT = 256  # what CUDA's allocator gives, and more than any host kernel asks for


class PlainMemory:
    """`nbytes` of memory of `device`, charged to `budget` while it lives. Its content is undefined until written.

    Raises:
        OutOfMemoryError: the budget or the device refused; nothing is held then.
    """

    def __init__(self, device: str, nbytes: int, budget: MemoryBudget | None = None) -> None:
        if budget is not None:
            budget.claim(nbytes)
        try:
            ordinal = cuda.device_ordinal(device)
            if ordinal is None:
                self._host = np.empty(nbytes + _ALIGNMENT, np.uint8)
                self.address = -(-self._host.ctypes.data // _ALIGNMENT) * _ALIGNMENT
            else:
                self._buffer = cuda.Buffer(nbytes, ordinal)
                self.address = self._buffer.address
        except BaseException:
            if budget is not None:
                budget.release(nbytes)
            raise
        self.nbytes = nbytes
        self._release = weakref.finalize(self, _release, budget, nbytes)

    def close(self) -> None:
        """Give the memory back; a second call does nothing. The caller has waited for work that uses it."""
        if self._release.alive:
            self.__dict__.pop("_host", None)
            if "_buffer" in self.__dict__:
                self._buffer.close()
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _release(budget: MemoryBudget | None, nbytes: int) -> None:
    if budget is not None:
        budget.release(nbytes)
