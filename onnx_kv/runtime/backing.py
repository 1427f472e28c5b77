"""The memory behind one cache's reservations: address space committed piece by piece, with its own counters."""

from __future__ import annotations

import time
from collections.abc import Sequence

from onnx_kv.geometry import ByteRange, gaps
from onnx_kv.memory import MemoryBudget, MemoryPool, Span

Ranges = Sequence[Sequence[ByteRange]]
"""Byte ranges of each reservation of a cache, ascending."""


class Backing:
    """Reservations of one pool, committed and decommitted together.

    Args:
        pool: where granules come from.
        sizes: bytes of each reservation.
        budget: what commits are charged to.
    """

    def __init__(self, pool: MemoryPool, sizes: Sequence[int], budget: MemoryBudget | None) -> None:
        self.pool = pool
        self.reservations = [pool.reserve(size, budget) for size in sizes]
        self.addresses = [reservation.address for reservation in self.reservations]
        self.physical_bytes = 0
        self.maps = 0
        self.unmaps = 0
        self.map_seconds = 0.0

    @property
    def reserved_bytes(self) -> int:
        """Address space of all reservations."""
        return sum(reservation.nbytes for reservation in self.reservations)

    def commit(self, ranges: Ranges) -> None:
        """Back every window that a range touches; all of them or, with an error, none that was not backed."""
        start = time.perf_counter()
        mapped = self.pool.commit(self._spans(ranges))
        self.map_seconds += time.perf_counter() - start
        self.physical_bytes += mapped
        self.maps += mapped // self.pool.granule

    def retain(self, ranges: Ranges) -> int:
        """Decommit every window that no range touches; return the bytes that nothing maps any more."""
        unwanted = [gaps(kept, item.nbytes) for kept, item in zip(ranges, self.reservations, strict=True)]
        released = self.pool.decommit(self._spans(unwanted))
        self.physical_bytes -= released.unmapped
        self.unmaps += released.unmapped // self.pool.granule
        return released.freed

    def close(self) -> None:
        """Give back memory and addresses. The caller has waited for work in flight."""
        for reservation in self.reservations:
            reservation.close()
        self.physical_bytes = 0

    def _spans(self, ranges: Ranges) -> list[Span]:
        return [
            Span(reservation, start, end)
            for reservation, items in zip(self.reservations, ranges, strict=True)
            for start, end in items
        ]
