"""The memory behind one cache's reservations: address space committed piece by piece, with its own counters."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from onnx_kv.errors import NativeError
from onnx_kv.geometry import ByteRange, Move, gaps, whole_granules
from onnx_kv.memory import MemoryBudget, MemoryPool, Span
from onnx_kv.runtime.transfer import Transfer

Ranges = Sequence[Sequence[ByteRange]]
"""Byte ranges of each reservation of a cache, ascending."""


class Window(NamedTuple):
    """One granule's place: the reservation and the byte offset where it begins, and how many of its bytes matter."""

    reservation: int
    start: int
    live: int


class Backing:
    """Reservations of one pool, committed and decommitted together.

    A granule that is mapped several times counts in `physical_bytes` where it was committed, and in `borrowed_bytes`
    where it was mapped by `share`. It is charged once, until nothing maps it.

    Args:
        pool: where granules come from.
        sizes: bytes of each reservation.
        budget: what commits are charged to.
    """

    def __init__(self, pool: MemoryPool, sizes: Sequence[int], budget: MemoryBudget | None) -> None:
        self.pool = pool
        self.budget = budget
        self.reservations = [pool.reserve(size, budget) for size in sizes]
        self.addresses = [reservation.address for reservation in self.reservations]
        self.physical_bytes = 0
        self.maps = 0
        self.unmaps = 0
        self.map_seconds = 0.0
        self._borrowed: set[tuple[int, int]] = set()  # reservation and offset

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of granules that were committed elsewhere and are mapped here too."""
        return len(self._borrowed) * self.pool.granule

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
        return self.drop([gaps(kept, item.nbytes) for kept, item in zip(ranges, self.reservations, strict=True)])

    def drop(self, ranges: Ranges) -> int:
        """Decommit every window that lies wholly in a range; return the bytes that nothing maps any more."""
        released = self.pool.decommit(self._spans(ranges))
        inside = [whole_granules(items, self.pool.granule) for items in ranges]
        returned = {
            (reservation, offset)
            for reservation, offset in self._borrowed
            if any(start <= offset < end for start, end in inside[reservation])
        }
        self._borrowed -= returned
        self.physical_bytes -= released.unmapped - len(returned) * self.pool.granule
        self.unmaps += released.unmapped // self.pool.granule
        return released.freed

    def share(self, ranges: Ranges, source: Backing, source_ranges: Ranges) -> None:
        """Map whole granules of `source` at windows of the same number here, none of which is backed; all or none."""
        self.pool.share(source._spans(source_ranges), self._spans(ranges))
        granule = self.pool.granule
        shared = {
            (reservation, offset)
            for reservation, items in enumerate(ranges)
            for start, end in items
            for offset in range(start, end, granule)
        }
        self._borrowed |= shared
        self.maps += len(shared)

    def detach(self, windows: Sequence[Window], transfer: Transfer) -> None:
        """Unmap shared granules, after putting one of this cache's own in the place of each that has live bytes.

        Windows are in ascending order. The live bytes keep their content. With an error every window that has any is
        as it was. The caller has waited for work in flight.
        """
        granule, kept = self.pool.granule, [window for window in windows if window.live]
        spans = [self._span(window) for window in kept]
        with contextlib.ExitStack() as stack:
            fresh, old = [], []
            if kept:
                fresh, old = [self._scratch(len(kept), stack) for _ in range(2)]
                self.pool.commit(fresh)
                moves = [
                    Move(
                        self.addresses[window.reservation] + window.start,
                        span.reservation.address + span.start,
                        window.live,
                    )
                    for window, span in zip(kept, fresh, strict=True)
                ]
                transfer.move(moves)
                transfer.synchronize()
                self.pool.share(spans, old)  # a second place for them, so that they can be put back
            borrowed = set(self._borrowed)
            dropped: list[list[ByteRange]] = [[] for _ in self.reservations]
            for window in windows:
                dropped[window.reservation].append(ByteRange(window.start, window.start + granule))
            self.drop(dropped)
            try:
                self.pool.share(fresh, spans)
            except NativeError:
                self.pool.share(old, spans)
                self.maps += len(kept)
                again = borrowed & {window[:2] for window in kept}
                self._borrowed |= again
                self.physical_bytes += (len(kept) - len(again)) * granule
                raise
        self.physical_bytes += len(kept) * granule
        self.maps += len(kept)

    def close(self) -> None:
        """Give back memory and addresses. The caller has waited for work in flight."""
        for reservation in self.reservations:
            reservation.close()
        self.physical_bytes = 0
        self._borrowed.clear()

    def is_shared(self, reservation: int, start: int) -> bool:
        """Whether the granule of the window that begins at `start` is mapped elsewhere too."""
        return self.pool.shared_bytes(self._span(Window(reservation, start, 0))) > 0

    def _scratch(self, count: int, stack: contextlib.ExitStack) -> list[Span]:
        """Address space for `count` granules, given back with `stack`: a span for each."""
        reservation = self.pool.reserve(count * self.pool.granule, self.budget)
        stack.callback(reservation.close)
        return [
            reservation.span(start, start + self.pool.granule)
            for start in range(0, count * self.pool.granule, self.pool.granule)
        ]

    def _span(self, window: Window) -> Span:
        return self.reservations[window.reservation].span(window.start, window.start + self.pool.granule)

    def _spans(self, ranges: Ranges) -> list[Span]:
        return [
            Span(reservation, start, end)
            for reservation, items in zip(self.reservations, ranges, strict=True)
            for start, end in items
        ]
