"""A call whose cache is only mapped where it is live, run as `python -m tests.support.guarded_gqa LAYOUT DTYPE`.

Prints `agrees` for a decode and for a chunk if the result equals that of an ordinary cache. A process of its own, since
a read beyond the live prefix ends it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

from tests.support.gqa_cases import Shape, attributes, make_call
from tests.support.gqa_reference import GqaInputs
from tests.support.ort_gqa import Cache, Way, run_gqa

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def protect(address: int, size: int, access: int) -> None:
    """Set the access of whole pages."""
    if _LIBC.mprotect(address, size, access) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


class GuardedCache(Cache):
    """A cache of which only the pages of a live prefix of `live` tokens can be touched."""

    live = 0

    def __init__(self, layout: int, node: Any, call: GqaInputs, capacity: int) -> None:
        super().__init__(layout, node, call, capacity)
        self.storage = [self._guard(array) for array in self.storage]

    def _guard(self, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        area = mmap.mmap(-1, like.nbytes)
        guarded = np.frombuffer(area, like.dtype).reshape(like.shape)
        guarded[...] = like
        # A stripe is what one sequence (head-major: one head of it) keeps together.
        stripes = like.shape[0] * (like.shape[1] if self.layout == 0 else 1)
        stripe = like.nbytes // stripes
        live = stripe // self.shape[2] * self.live
        assert stripe % PAGE == 0
        assert live % PAGE == 0
        base = int(guarded.__array_interface__["data"][0])
        for i in range(stripes):
            protect(base + i * stripe + live, stripe - live, 0)
        self._areas = [*getattr(self, "_areas", []), area]
        return guarded


def main(layout: int, dtype: str) -> None:
    """Run both calls both ways."""
    import tests.support.ort_gqa as module

    for fresh in (1, 5):
        shape = Shape((192 - fresh,), (fresh,), fresh, 2, 3, 64, room=64)
        node = attributes(shape, do_rotary=True)
        call = make_call(shape, dtype=np.dtype(dtype), rotary_dim=64)
        expected = run_gqa(node, call, Way(layout))
        GuardedCache.live = 192
        module.Cache = GuardedCache  # type: ignore[misc]
        found = run_gqa(node, call, Way(layout))
        module.Cache = Cache  # type: ignore[misc]
        print("agrees" if np.array_equal(found.output, expected.output) else "differs")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
