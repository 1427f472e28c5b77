"""Where the bytes of a KV cache lie: live ranges, granules, growth and sharing, as arithmetic without a device.

Built on `layout.py`, which alone knows how a layout orders its axes. Seen from here every layout is the same thing: a
*reservation* is a row of equally spaced *stripes*, each holding the tokens of one sequence one after another:

    stripe s begins at s · capacity · unit, token t of it at + t · unit        (in bytes)

Head-major has one stripe for each (row, head) and `unit = head_dim · element_size`; the other layouts have one stripe a
row, and `unit` is all that the reservation stores for a token. A stripe is thus the contiguous fragment of a sequence
which growth moves and prefix sharing maps.

Two ways to size the stripes exist, and a count of granules is only true for the policy that builds them:

- `fixed_stride`: stripes are spaced for the longest sequence, and only the live prefix of each is committed. Nothing
  ever moves.
- `bucket` and `realloc`: stripes are packed for a capacity that doubles, and all of them are committed. A growth moves
  every stripe but the first (`bucket`, in place) or all of them (`realloc`, into fresh memory).

All sizes are bytes and all lengths tokens unless a name says otherwise.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onnx_kv import layout as layouts
from onnx_kv.errors import CapacityError, ConfigError
from onnx_kv.layout import KvLayout, LayerShape, Side

MAX_BYTES = 2**63 - 1
"""Largest reservation that 64-bit signed address arithmetic can index."""


class GrowthPolicy(enum.StrEnum):
    """How a cache makes room for more tokens."""

    FIXED_STRIDE = "fixed_stride"
    BUCKET = "bucket"
    REALLOC = "realloc"


class ByteRange(NamedTuple):
    """Bytes `[start, end)` of a reservation."""

    start: int
    end: int


class Move(NamedTuple):
    """Copy `nbytes` from offset `source` to offset `destination`; the two may overlap, as in memmove."""

    source: int
    destination: int
    nbytes: int


class Block(NamedTuple):
    """One row's live bytes of one binding: `height` runs of `width` bytes, `pitch` bytes from start to start.

    Head-major has one run a head, `[heads][tokens · head_dim]`; the other layouts have one run a token,
    `[tokens][heads · head_dim]`.
    """

    offset: int
    pitch: int
    width: int
    height: int


class _Stripes(NamedTuple):
    """What a reservation is made of: bytes a token within a stripe, and stripes that hold one sequence."""

    unit: int
    per_row: int


@dataclass(frozen=True)
class CacheGeometry:
    """The byte geometry of one model's cache, for `batch` sequences.

    Layers may differ in heads and head size.
    """

    layout: KvLayout
    layers: tuple[LayerShape, ...]
    element_size: int
    batch: int = 1

    def __post_init__(self) -> None:
        sizes = [self.batch, self.element_size, len(self.layers)]
        sizes += [size for shape in self.layers for size in (shape.kv_heads, shape.head_dim)]
        if min(sizes) < 1:
            raise ConfigError("a cache needs at least one row, layer, head, head dimension and byte an element")

    @property
    def reservations(self) -> int:
        """Number of separate address ranges."""
        return len(self._stripes)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token of one sequence takes over the whole model; the same in every layout."""
        return self.element_size * sum(2 * shape.width for shape in self.layers)

    def unit(self, reservation: int) -> int:
        """Bytes from one token to the next within a stripe."""
        return self._stripes[reservation].unit

    def stripes_per_row(self, reservation: int) -> int:
        """Number of stripes that hold one sequence."""
        return self._stripes[reservation].per_row

    def reservation_bytes(self, reservation: int, capacity: int) -> int:
        """Bytes from the first to the last that `capacity` tokens a row can use.

        Raises:
            ConfigError: they cannot be indexed in 64 bits.
        """
        nbytes = self.batch * self.stripes_per_row(reservation) * capacity * self.unit(reservation)
        if nbytes > MAX_BYTES:
            raise ConfigError(
                f"{self.batch} sequences of {capacity} tokens need {nbytes} bytes of address space in one reservation; "
                f"at most {MAX_BYTES} can be indexed"
            )
        return nbytes

    def total_bytes(self, capacity: int) -> int:
        """Bytes of all reservations together."""
        return sum(self.reservation_bytes(index, capacity) for index in range(self.reservations))

    def live_ranges(
        self, reservation: int, capacity: int, lengths: Sequence[int], starts: Sequence[int] | None = None
    ) -> list[ByteRange]:
        """The bytes that hold tokens `starts[b]` (or 0) to `lengths[b]` of each row, one range a stripe, ascending.

        Raises:
            CapacityError: a row is longer than the capacity.
        """
        self._check_lengths(lengths, capacity)
        self.reservation_bytes(reservation, capacity)
        unit, per_row = self.unit(reservation), self.stripes_per_row(reservation)
        ranges = []
        for row, (start, end) in enumerate(zip(starts or [0] * self.batch, lengths, strict=True)):
            for stripe in range(row * per_row, (row + 1) * per_row):
                if start < end:
                    ranges.append(ByteRange((stripe * capacity + start) * unit, (stripe * capacity + end) * unit))
        return ranges

    def committed_ranges(
        self, policy: GrowthPolicy, reservation: int, capacity: int, lengths: Sequence[int]
    ) -> list[ByteRange]:
        """The bytes that a policy backs with memory: each row's first `lengths[b]` tokens, or the packed capacity."""
        if policy is GrowthPolicy.FIXED_STRIDE:
            return self.live_ranges(reservation, capacity, lengths)
        self._check_lengths(lengths, capacity)
        return [ByteRange(0, self.reservation_bytes(reservation, capacity))] if capacity else []

    def physical_bytes(self, policy: GrowthPolicy, capacity: int, lengths: Sequence[int], granule: int) -> int:
        """Bytes of memory that the whole cache takes, in whole granules where granules are mapped."""
        if policy is GrowthPolicy.REALLOC:
            return self.total_bytes(capacity)
        return granule * sum(
            granules_touched(self.committed_ranges(policy, index, capacity, lengths), granule)
            for index in range(self.reservations)
        )

    def binding(self, layer: int, side: Side) -> tuple[int, int]:
        """The reservation that a binding lies in, and the byte offset of its first element there."""
        offset = layouts.token_offset(self.layout, self.layers, layer, side)
        return layouts.reservation_index(self.layout, layer, side), offset * self.element_size

    def block(self, layer: int, side: Side, row: int, capacity: int, length: int) -> Block:
        """Where the first `length` tokens of one row of a binding lie in its reservation."""
        self._check_lengths([length], capacity)
        shape, size = self.layers[layer], self.element_size
        strides = layouts.strides(self.layout, self.layers, layer, capacity)
        offset = self.binding(layer, side)[1] + row * strides.batch * size
        if self.layout is KvLayout.HEAD_MAJOR:
            return Block(offset, strides.head * size, length * shape.head_dim * size, shape.kv_heads)
        return Block(offset, strides.seq * size, shape.width * size, length)

    def restrides(self, reservation: int) -> bool:
        """Whether a change of capacity changes any address of this reservation: it has more stripes than one."""
        return self.batch * self.stripes_per_row(reservation) > 1

    def moves(self, reservation: int, lengths: Sequence[int], old: int, new: int) -> list[Move]:
        """Copies that re-stride a reservation in place from capacity `old` to `new`, in the order they must run.

        Growing stripes move from the last to the first and shrinking ones from the first to the last, so that no copy
        overwrites live bytes of another stripe. The first stripe stays where it is.

        Raises:
            CapacityError: a row is longer than one of the capacities.
        """
        moved = self.relocations(reservation, lengths, old, new)
        if new > old:
            moved.reverse()
        return [move for move in moved if move.source != move.destination]

    def relocations(self, reservation: int, lengths: Sequence[int], old: int, new: int) -> list[Move]:
        """Copies from a buffer of capacity `old` into another of capacity `new`, one a stripe, in ascending order."""
        self._check_lengths(lengths, min(old, new))
        self.reservation_bytes(reservation, max(old, new))
        unit, per_row = self.unit(reservation), self.stripes_per_row(reservation)
        return [
            Move(stripe * old * unit, stripe * new * unit, lengths[stripe // per_row] * unit)
            for stripe in range(self.batch * per_row)
            if lengths[stripe // per_row]
        ]

    def moved_bytes(self, policy: GrowthPolicy, lengths: Sequence[int]) -> int:
        """Live bytes of the reservations that a growth re-strides or reallocates.

        A re-strided reservation counts whole, its first stripe too, which growth in place leaves where it is.
        """
        if policy is GrowthPolicy.FIXED_STRIDE:
            return 0
        return sum(
            sum(lengths) * self.stripes_per_row(index) * self.unit(index)
            for index in range(self.reservations)
            if policy is GrowthPolicy.REALLOC or self.restrides(index)
        )

    def crossover(self, granule: int) -> int | None:
        """Tokens from which every stripe fills a granule, so that a fixed stride wastes none of them on short stripes.

        None for a layout that keeps a whole sequence in one stripe: it never spreads a prefix over several.
        """
        if self.layout is KvLayout.TOKEN_MAJOR:
            return None
        return self.shareable_from(granule)

    def shareable_from(self, granule: int) -> int:
        """Tokens from which a prefix can be shared by mapping: each fragment of it fills a granule."""
        return max(-(-granule // self.unit(index)) for index in range(self.reservations))

    def shareable(self, prefix: int, granule: int) -> bool:
        """Whether a prefix of that many tokens can be shared by mapping whole granules."""
        return prefix >= self.shareable_from(granule)

    def shared_granules(self, prefix: int, granule: int) -> int:
        """Granules of one sequence's prefix that another can map instead of copying; 0 if it is not shareable.

        Counts stripes that begin at a granule's edge, as those of the first row do where the capacity is a multiple
        of the granule; `whole_granules` says which windows qualify in a given cache.
        """
        if not self.shareable(prefix, granule):
            return 0
        return sum(
            self.stripes_per_row(index) * (prefix * self.unit(index) // granule) for index in range(self.reservations)
        )

    @functools.cached_property
    def _stripes(self) -> tuple[_Stripes, ...]:
        """The stripes of each reservation; computed once, since growth asks for them in every step of a decode."""
        stripes: dict[int, _Stripes] = {}
        for layer, shape in enumerate(self.layers):
            if self.layout is KvLayout.HEAD_MAJOR:
                found = _Stripes(shape.head_dim * self.element_size, shape.kv_heads)
            else:
                found = _Stripes(layouts.token_width(self.layout, self.layers, layer) * self.element_size, 1)
            for side in Side:
                stripes[layouts.reservation_index(self.layout, layer, side)] = found
        return tuple(stripes[index] for index in sorted(stripes))

    def _check_lengths(self, lengths: Sequence[int], capacity: int) -> None:
        if min(lengths) < 0 or max(lengths) > capacity:
            raise CapacityError(f"rows of {list(lengths)} tokens do not fit in a capacity of {capacity}")


def granules_touched(ranges: Iterable[ByteRange], granule: int) -> int:
    """Number of granule-sized windows that hold a byte of the ranges, which must be in ascending order."""
    count, done = 0, 0
    for start, end in ranges:
        first, last = max(start // granule, done), -(-end // granule)
        count += max(0, last - first)
        done = max(done, last)
    return count


def whole_granules(ranges: Iterable[ByteRange], granule: int) -> list[ByteRange]:
    """The part of each range that consists of whole windows; ranges without one are left out."""
    inner = (ByteRange(-(-start // granule) * granule, end // granule * granule) for start, end in ranges)
    return [window for window in inner if window.start < window.end]


def next_bucket(length: int, min_bucket: int, max_length: int) -> int:
    """Capacity of the bucket that holds `length` tokens: the next power of two, at least `min_bucket`.

    Raises:
        CapacityError: `length` is beyond `max_length`.
    """
    if length > max_length:
        raise CapacityError(f"{length} tokens do not fit: the cache was made for at most {max_length} a sequence")
    return min(max(min_bucket, 1 << max(0, length - 1).bit_length()), max_length)


def next_commit(length: int, min_bucket: int, step: int, max_length: int) -> int:
    """Tokens that a fixed stride commits for `length`: it doubles like a bucket, but by no more than `step` at a time.

    Raises:
        CapacityError: `length` is beyond `max_length`.
    """
    stepped = max(min_bucket, -(-length // step) * step)
    return min(next_bucket(length, min_bucket, max_length), stepped, max_length)


def gaps(ranges: Iterable[ByteRange], nbytes: int) -> list[ByteRange]:
    """The bytes of a reservation of `nbytes` that lie in none of the ranges, which must be in ascending order."""
    found, done = [], 0
    for start, end in ranges:
        if start > done:
            found.append(ByteRange(done, start))
        done = max(done, end)
    if done < nbytes:
        found.append(ByteRange(done, nbytes))
    return found


def default_policy(layout: KvLayout) -> GrowthPolicy:
    """The policy under which a layout commits least: only head-major spreads a short prefix over many stripes."""
    return GrowthPolicy.BUCKET if layout is KvLayout.HEAD_MAJOR else GrowthPolicy.FIXED_STRIDE
