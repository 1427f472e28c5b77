"""Rows that start from tokens which another row holds: whole granules are mapped once more, the rest is copied.

The keys and values of a row's first tokens depend on nothing behind them, so rows that begin alike can have one copy of
them. Memory is mapped in granules, so of each stripe of a prefix the granules that lie wholly in it are shared and its
ends are copied. That happens for all stripes of a cache, keys and values, or for none: a prefix that cannot be
shared is copied, and the reason is told.

A shared granule is read-only. Before a row writes a token whose place lies in one, after a rewind into its prefix, it
gets a granule of its own with a copy of what it still needs (`detach`). Who has committed a granule is of no importance
for that: the pool counts what maps it, and it lives until nothing does.

| reason         | what it means                                                                    |
|----------------|----------------------------------------------------------------------------------|
| `policy`       | one of the caches packs its stripes in a bucket or in plain memory               |
| `pool`         | the caches take their memory from different pools                                |
| `budget`       | the caches are charged to different budgets                                      |
| `short_prefix` | a stripe of the prefix is smaller than a granule                                 |
| `alignment`    | a stripe does not lie in its granules as the other row's does                    |
| `driver`       | a driver call failed; its message follows                                        |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx_kv.errors import NativeError
from onnx_kv.geometry import ByteRange, CacheGeometry, Move, gaps, whole_granules
from onnx_kv.runtime.backing import Window
from onnx_kv.runtime.growth import FixedStride, Growth
from onnx_kv.runtime.transfer import Transfer


@dataclass(frozen=True)
class Start:
    """How a row got its first tokens: bytes mapped, bytes copied, and why all of them had to be copied, if so."""

    mapped_bytes: int
    copied_bytes: int
    decline_reason: str | None


class Sharing:
    """What one cache shares with others and among its rows."""

    def __init__(self, geometry: CacheGeometry, growth: Growth, transfer: Transfer) -> None:
        self._geometry = geometry
        self._growth = growth
        self._transfer = transfer
        self._until = [0] * geometry.batch  # tokens of each row that may lie in granules mapped elsewhere too

    def reaches(self, row: int, length: int) -> bool:
        """Whether a token behind the first `length` of a row may lie in a shared granule."""
        return length < self._until[row]

    def decline_reason(self, row: int, source: Sharing, source_row: int, tokens: int) -> str | None:
        """Why a row cannot map the first `tokens` of a row of `source`; None where it can."""
        mine, its = self._growth, source._growth
        if not (isinstance(mine, FixedStride) and isinstance(its, FixedStride)):
            return "policy: only granules of caches with a fixed stride can be shared; set growth to fixed-stride"
        if mine.backing.pool is not its.backing.pool:
            return "pool: the caches take their memory from different pools"
        if mine.backing.budget is not its.backing.budget:
            return "budget: the caches are charged to different budgets"
        granule = mine.backing.pool.granule
        if not self._geometry.shareable(tokens, granule):
            return (
                f"short_prefix: {tokens} tokens do not fill a granule of {granule} bytes in every stripe; "
                f"{self._geometry.shareable_from(granule)} do"
            )
        for here, there in zip(self._stripes(row, tokens), source._stripes(source_row, tokens), strict=True):
            if len(whole_granules(here, granule)) < len(here) or any(
                (a.start - b.start) % granule for a, b in zip(here, there, strict=True)
            ):
                return (
                    f"alignment: rows of {mine.capacity} and {its.capacity} tokens do not begin at multiples of "
                    f"{granule} bytes; make max_length a multiple of {self._aligned_length(granule)}"
                )
        return None

    def map(self, row: int, source: Sharing, source_row: int, tokens: int) -> Start:
        """Map what can be mapped of the first `tokens` of a row of `source` at an empty row's place.

        The rest is for `copy`, when there is memory for it.
        """
        reason = self.decline_reason(row, source, source_row, tokens)
        if reason is None:
            try:
                return Start(self._map(row, source, source_row, tokens), 0, None)
            except NativeError as error:
                reason = f"driver: {error}"
        return Start(0, 0, reason)

    def copy(self, row: int, source: Sharing, source_row: int, tokens: int, mapped: bool) -> int:
        """Copy the first `tokens` of a row of `source`, but for what `map` mapped; return the number of bytes."""
        source._transfer.synchronize()
        moves = []
        stripes = zip(self._stripes(row, tokens), source._stripes(source_row, tokens), strict=True)
        for index, (here, there) in enumerate(stripes):
            to, origin = self._growth.addresses[index], source._growth.addresses[index]
            for target, place in zip(here, there, strict=True):
                for start, end in self._ends(target) if mapped else [target]:
                    moves.append(Move(origin + place.start + start - target.start, to + start, end - start))
        self._transfer.move(moves)
        return sum(move.nbytes for move in moves)

    def detach(self, row: int, start: int, keep: int) -> int:
        """Let nothing from token `start` of a row on lie in shared granules; return how many it had there.

        The row's first `keep` tokens, which are at least `start`, keep their content; memory behind them is given up.

        Raises:
            OutOfMemoryError, DriverError: the memory for its own copy cannot be had. The row is as it was.
        """
        growth, until = self._growth, self._until[row]
        if until <= start or not isinstance(growth, FixedStride):
            return 0
        windows = self._shared_windows(growth, row, start, keep)
        if windows:
            self._transfer.synchronize()
            growth.forget(row, keep)
            growth.backing.detach(windows, self._transfer)
        self._until[row] = start
        return len(windows)

    def _map(self, row: int, source: Sharing, source_row: int, tokens: int) -> int:
        mine, its = self._growth, source._growth
        assert isinstance(mine, FixedStride), "decline_reason() said so"
        assert isinstance(its, FixedStride), "decline_reason() said so"
        granule = mine.backing.pool.granule
        windows = [whole_granules(stripes, granule) for stripes in self._stripes(row, tokens)]
        sources = [whole_granules(stripes, granule) for stripes in source._stripes(source_row, tokens)]
        self._until[row] = max(self._until[row], tokens)
        source._until[source_row] = max(source._until[source_row], tokens)
        self._transfer.synchronize()
        mine.forget(row, 0)
        mine.backing.drop(windows)
        mine.backing.share(windows, its.backing, sources)
        return sum(end - start for items in windows for start, end in items)

    def _shared_windows(self, growth: FixedStride, row: int, start: int, keep: int) -> list[Window]:
        """The shared windows that hold tokens from `start` on, in ascending order, with the bytes to be kept of each.

        Such a window lies wholly in one stripe of the row, or it could not have been shared.
        """
        granule, found = growth.backing.pool.granule, []
        for index, stripes in enumerate(self._stripes(row, self._until[row])):
            unit = self._geometry.unit(index)
            for stripe in stripes:
                first = (stripe.start + start * unit) // granule * granule
                for window in range(first, stripe.end, granule):
                    if growth.backing.is_shared(index, window):
                        live = min(granule, max(0, stripe.start + keep * unit - window))
                        found.append(Window(index, window, live))
        return found

    def _aligned_length(self, granule: int) -> int:
        """Capacity whose multiples let every stripe begin at a granule's edge."""
        units = (self._geometry.unit(index) for index in range(self._geometry.reservations))
        return max(granule // math.gcd(granule, unit) for unit in units)

    def _stripes(self, row: int, tokens: int) -> list[list[ByteRange]]:
        """Where the first `tokens` of a row lie in each reservation."""
        lengths = [0] * self._geometry.batch
        lengths[row] = tokens
        return [
            self._geometry.live_ranges(index, self._growth.capacity, lengths)
            for index in range(self._geometry.reservations)
        ]

    def _ends(self, stripe: ByteRange) -> list[ByteRange]:
        """What of a stripe is not whole granules."""
        backing = self._growth.backing
        assert backing is not None, "it was mapped"
        outside = gaps(whole_granules([stripe], backing.pool.granule), stripe.end)
        return [ByteRange(max(start, stripe.start), end) for start, end in outside if end > stripe.start]
