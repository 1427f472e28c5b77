"""The three ways a cache makes room: at a fixed stride, in buckets in place, or in buckets by reallocation.

Each knows its memory and its capacity (the stride that bindings have), and makes room for rows of given lengths without
losing the tokens that are there. A step that fails (a refused budget, a failed driver call) leaves all as it was.

| policy         | capacity                     | committed                              | a growth moves      |
|----------------|------------------------------|----------------------------------------|---------------------|
| `fixed_stride` | the longest sequence, always | each row's prefix, up to `step` beyond | nothing             |
| `bucket`       | a power of two               | the packed capacity                    | all stripes but one |
| `realloc`      | a power of two               | plain memory of the packed capacity    | everything          |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from onnx_kv.errors import OnnxKvError
from onnx_kv.geometry import ByteRange, CacheGeometry, GrowthPolicy, Move, next_bucket, next_commit
from onnx_kv.memory import MemoryBudget, MemoryPool
from onnx_kv.plain_memory import PlainMemory
from onnx_kv.runtime.backing import Backing, Ranges
from onnx_kv.runtime.transfer import Transfer


class Moved(NamedTuple):
    """What a growth did to live bytes: those of re-strided or reallocated memory, and those that were copied."""

    nbytes: int
    copied: int


class Piece(NamedTuple):
    """Bytes of one reservation that the next growth will need."""

    reservation: int
    range: ByteRange


class Boundary(NamedTuple):
    """A part grows when it exceeds `at` tokens, which is after `left` more."""

    at: int
    left: int


class Growth(Protocol):
    """One policy at work on one cache."""

    capacity: int
    """Tokens between the starts of neighbouring stripes: axis 2 of the bindings."""

    @property
    def addresses(self) -> Sequence[int]:
        """Start of each reservation."""

    @property
    def physical_bytes(self) -> int:
        """Bytes of memory held: whole granules where they are mapped."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of address range held."""

    @property
    def backing(self) -> Backing | None:
        """The reservations; None for plain memory."""

    def covers(self, lengths: Sequence[int]) -> bool:
        """Whether there is room for rows of these lengths."""

    def grow(self, live: Sequence[int], lengths: Sequence[int]) -> Moved:
        """Make room for `lengths`; the first `live[b]` tokens of each row keep their content."""

    def boundaries(self, lengths: Sequence[int]) -> list[Boundary]:
        """Where each part of the cache that grows by itself will do so: each row, or the bucket as a whole."""

    def upcoming(self, part: int) -> list[Piece]:
        """What the next growth of a part will commit, in pieces small enough for one step each."""

    def trim(self, live: Sequence[int]) -> None:
        """Give back what rows of these lengths do not need. No work in flight touches the cache."""

    def close(self) -> None:
        """Give everything back. No work in flight touches the cache."""


def make_growth(
    policy: GrowthPolicy,
    geometry: CacheGeometry,
    transfer: Transfer,
    memory: MemoryPool | str,
    budget: MemoryBudget | None,
    *,
    max_length: int,
    min_bucket: int,
    step: int,
) -> Growth:
    """Return a policy at work on an empty cache.

    Args:
        policy: which one.
        geometry: the cache's bytes.
        transfer: what moves them.
        memory: the pool that granules come from; the device's name for a policy on plain memory.
        budget: what memory is charged to.
        max_length: most tokens of a row.
        min_bucket: tokens of the smallest capacity.
        step: most tokens that a fixed stride commits at a time.

    Raises:
        OutOfMemoryError: there is no address space, or not the plain memory of the smallest capacity.
    """
    if isinstance(memory, str):
        return _Realloc(geometry, transfer, memory, budget, max_length, min_bucket)
    sizes = [geometry.reservation_bytes(index, max_length) for index in range(geometry.reservations)]
    backing = Backing(memory, sizes, budget)
    if policy is GrowthPolicy.FIXED_STRIDE:
        return FixedStride(geometry, backing, max_length, min_bucket, step)
    return _InPlaceBucket(geometry, backing, transfer, max_length, min_bucket)


class _Mapped:
    """What the policies on reservations have in common."""

    def __init__(self, geometry: CacheGeometry, backing: Backing) -> None:
        self._geometry = geometry
        self.backing = backing

    @property
    def addresses(self) -> Sequence[int]:
        return self.backing.addresses

    @property
    def physical_bytes(self) -> int:
        return self.backing.physical_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.backing.reserved_bytes

    def close(self) -> None:
        self.backing.close()

    def _pieces(self, ranges: Ranges) -> list[Piece]:
        """Split ranges at windows. What precedes a range is committed, and with it the window that both lie in."""
        granule = self.backing.pool.granule
        return [
            Piece(reservation, ByteRange(window, min(end, window + granule)))
            for reservation, items in enumerate(ranges)
            for start, end in items
            for window in range(-(-start // granule) * granule, end, granule)
        ]


class FixedStride(_Mapped):
    """Stripes spaced for the longest sequence; each row's prefix is committed, `step` tokens at a time.

    Since no stripe ever moves, rows can share granules: `sharing.py` maps them and tells by `forget` what it unmapped.
    """

    def __init__(self, geometry: CacheGeometry, backing: Backing, max_length: int, min_bucket: int, step: int) -> None:
        super().__init__(geometry, backing)
        self.capacity = max_length
        self._min_bucket = min_bucket
        self._step = step
        self._committed = [0] * geometry.batch

    def covers(self, lengths: Sequence[int]) -> bool:
        """See `Growth`."""
        return all(length <= done for length, done in zip(lengths, self._committed, strict=True))

    def grow(self, live: Sequence[int], lengths: Sequence[int]) -> Moved:
        """See `Growth`."""
        targets = [
            self._target(length) if length > done else done
            for length, done in zip(lengths, self._committed, strict=True)
        ]
        self.backing.commit(self._ranges(targets, self._committed))
        self._committed = targets
        return Moved(0, 0)

    def boundaries(self, lengths: Sequence[int]) -> list[Boundary]:
        """See `Growth`."""
        return [Boundary(done, done - length) for length, done in zip(lengths, self._committed, strict=True)]

    def upcoming(self, part: int) -> list[Piece]:
        """See `Growth`."""
        if self._committed[part] in (0, self.capacity):
            return []  # an empty row is not about to grow, a full one cannot
        targets = list(self._committed)
        targets[part] = self._target(targets[part] + 1)
        return self._pieces(self._ranges(targets, self._committed))

    def trim(self, live: Sequence[int]) -> None:
        """See `Growth`."""
        targets = [
            min(self._target(length), done) if length else 0 for length, done in zip(live, self._committed, strict=True)
        ]
        self.backing.retain(self._ranges(targets, None))
        self._committed = targets

    def forget(self, row: int, length: int) -> None:
        """Take nothing beyond a row's first `length` tokens for committed: the next growth looks for itself."""
        self._committed[row] = min(self._committed[row], length)

    def _target(self, length: int) -> int:
        return next_commit(length, self._min_bucket, self._step, self.capacity)

    def _ranges(self, lengths: Sequence[int], starts: Sequence[int] | None) -> Ranges:
        return [
            self._geometry.live_ranges(index, self.capacity, lengths, starts)
            for index in range(self._geometry.reservations)
        ]


class _InPlaceBucket(_Mapped):
    """Stripes packed for a capacity that doubles on one reservation; a growth re-strides them where they are."""

    def __init__(
        self, geometry: CacheGeometry, backing: Backing, transfer: Transfer, max_length: int, min_bucket: int
    ) -> None:
        super().__init__(geometry, backing)
        self._transfer = transfer
        self._max_length = max_length
        self._min_bucket = min_bucket
        self.capacity = next_bucket(0, min_bucket, max_length)
        self._committed = 0  # tokens of capacity that are backed: 0 or all of it

    def covers(self, lengths: Sequence[int]) -> bool:
        return max(lengths) <= self._committed

    def grow(self, live: Sequence[int], lengths: Sequence[int]) -> Moved:
        capacity = max(self.capacity, next_bucket(max(lengths), self._min_bucket, self._max_length))
        self.backing.commit(self._ranges(capacity))
        try:
            moved = self._restride(live, capacity)
        except OnnxKvError:
            self.backing.retain(self._ranges(self._committed))
            raise
        self._committed = capacity
        return moved

    def boundaries(self, lengths: Sequence[int]) -> list[Boundary]:
        return [Boundary(self.capacity, self.capacity - max(lengths))]

    def upcoming(self, part: int) -> list[Piece]:
        if self.capacity == self._max_length:
            return []
        following = self._ranges(next_bucket(self.capacity + 1, self._min_bucket, self._max_length))
        present = self._ranges(self.capacity)
        return self._pieces([[ByteRange(old.end, new.end)] for (old,), (new,) in zip(present, following, strict=True)])

    def trim(self, live: Sequence[int]) -> None:
        capacity = next_bucket(max(live), self._min_bucket, self._max_length)
        self._restride(live, capacity)
        self._transfer.synchronize()
        self._committed = capacity if max(live) else 0
        self.backing.retain(self._ranges(self._committed))

    def _restride(self, live: Sequence[int], capacity: int) -> Moved:
        geometry, copied, moves = self._geometry, 0, []
        if capacity == self.capacity:
            return Moved(0, 0)
        for index, address in enumerate(self.addresses):
            for source, destination, nbytes in geometry.moves(index, live, self.capacity, capacity):
                moves.append(Move(address + source, address + destination, nbytes))
                copied += nbytes
        self._transfer.move(moves)
        self.capacity = capacity
        return Moved(geometry.moved_bytes(GrowthPolicy.BUCKET, live), copied)

    def _ranges(self, capacity: int) -> Ranges:
        return [
            [ByteRange(0, self._geometry.reservation_bytes(index, capacity))]
            for index in range(self._geometry.reservations)
        ]


class _Realloc:
    """Stripes packed for a capacity that doubles, each time in fresh plain memory; the live prefix is copied over."""

    backing = None

    def __init__(
        self,
        geometry: CacheGeometry,
        transfer: Transfer,
        device: str,
        budget: MemoryBudget | None,
        max_length: int,
        min_bucket: int,
    ) -> None:
        self._geometry = geometry
        self._transfer = transfer
        self._device = device
        self._budget = budget
        self._max_length = max_length
        self._min_bucket = min_bucket
        self.capacity = next_bucket(0, min_bucket, max_length)
        self._buffers = self._allocate(self.capacity)

    @property
    def addresses(self) -> Sequence[int]:
        return [buffer.address for buffer in self._buffers]

    @property
    def physical_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    reserved_bytes = physical_bytes

    def covers(self, lengths: Sequence[int]) -> bool:
        return max(lengths) <= self.capacity

    def grow(self, live: Sequence[int], lengths: Sequence[int]) -> Moved:
        return self._replace(live, next_bucket(max(lengths), self._min_bucket, self._max_length))

    def boundaries(self, lengths: Sequence[int]) -> list[Boundary]:
        return []  # nothing can be done ahead

    def upcoming(self, part: int) -> list[Piece]:
        return []

    def trim(self, live: Sequence[int]) -> None:
        capacity = next_bucket(max(live), self._min_bucket, self._max_length)
        if capacity != self.capacity:
            self._replace(live, capacity)

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _replace(self, live: Sequence[int], capacity: int) -> Moved:
        buffers, moves = self._allocate(capacity), []
        for index, (old, new) in enumerate(zip(self._buffers, buffers, strict=True)):
            for source, destination, nbytes in self._geometry.relocations(index, live, self.capacity, capacity):
                moves.append(Move(old.address + source, new.address + destination, nbytes))
        try:
            self._transfer.move(moves)
            self._transfer.synchronize()  # the old memory is about to go
        except OnnxKvError:
            for buffer in buffers:
                buffer.close()
            raise
        self.close()
        self._buffers, self.capacity = buffers, capacity
        moved = self._geometry.moved_bytes(GrowthPolicy.REALLOC, live)
        return Moved(moved, moved)

    def _allocate(self, capacity: int) -> list[PlainMemory]:
        buffers: list[PlainMemory] = []
        try:
            for index in range(self._geometry.reservations):
                nbytes = self._geometry.reservation_bytes(index, capacity)
                buffers.append(PlainMemory(self._device, nbytes, self._budget))
        except BaseException:
            for buffer in buffers:
                buffer.close()
            raise
        return buffers
