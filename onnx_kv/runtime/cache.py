"""The growing KV cache of one model: room for rows of any length up to a maximum, made as they grow.

A cache is one or more reservations laid out as `geometry.py` says. `ensure(lengths)` makes room for that many tokens of
each row and returns a `GrowthEvent` when the longest row outgrew its bucket; between growths it maps the memory of the
next one piece by piece, so that no single step pays for it. Whatever the layout, the bindings have the shape
`[batch, kv_heads, capacity, head_dim]`.

What every consumer needs works in every layout, and speaks BNSH numpy arrays (`[batch, kv_heads, tokens, head_dim]`):
`read`, `write` (seed a prefix), `start` (from another row's tokens, `sharing.py`), `rewind`, `reset`, `trim`, and
saving to a file in `cache_file.py`. Bytes that no token was written to are never read.

An operation that fails (a refused budget, a failed driver call) changes nothing: the rows are as they were.
One thread at a time uses a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from onnx_kv.cuda import Stream
from onnx_kv.errors import CapacityError, ConfigError, NativeError, UnsupportedError
from onnx_kv.geometry import CacheGeometry, GrowthPolicy, default_policy, next_bucket
from onnx_kv.layout import KvLayout, LayerShape, Side, strides
from onnx_kv.memory import MemoryBudget, MemoryPool
from onnx_kv.runtime.backing import Backing
from onnx_kv.runtime.binding import Binding
from onnx_kv.runtime.commit_ahead import CommitAhead
from onnx_kv.runtime.growth import Moved, make_growth
from onnx_kv.runtime.growth_event import CacheCounters, GrowthEvent
from onnx_kv.runtime.row_access import RowAccess
from onnx_kv.runtime.sharing import Sharing, Start
from onnx_kv.runtime.transfer import transfer_for

DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
"""Element types of a cache, as graphs name them."""


class KvCache:
    """See the module.

    Args:
        layers: what each layer stores, in the order of the graph's inputs.
        layout: where it lies.
        dtype: `float32`, `float16` or `bfloat16`.
        batch: rows.
        max_length: most tokens a row will ever have.
        policy: how room is made; None for the layout's default.
        min_bucket: tokens of the smallest bucket.
        commit_ahead: how far beyond the live prefix memory may be committed, in tokens. 0: none, and a fixed stride
            commits token by token.
        device: `cpu`, `cuda` or `cuda:N`.
        stream: on CUDA, the stream that all work on the cache is queued on.
        pool: where granules come from; None for the device's shared pool.
        budget: what memory is charged to; None for no limit.

    Raises:
        OutOfMemoryError: there is no memory or address space for the smallest cache.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        layout: KvLayout,
        dtype: str,
        batch: int,
        max_length: int,
        *,
        policy: GrowthPolicy | None = None,
        min_bucket: int = 256,
        commit_ahead: int = 256,
        device: str = "cpu",
        stream: Stream | None = None,
        pool: MemoryPool | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"a cache of {dtype} is not supported; use one of: {', '.join(DTYPES)}")
        if min(max_length, min_bucket) < 1 or commit_ahead < 0:
            raise ConfigError("a cache needs max_length and min_bucket of at least 1 and commit_ahead of at least 0")
        self.dtype = np.dtype(DTYPES[dtype])
        self.geometry = CacheGeometry(layout, tuple(layers), self.dtype.itemsize, batch)
        self.device = device
        self.max_length = max_length
        self.policy = policy or default_policy(layout)
        self.decline_reason: str | None = None
        """Why the cache grows by copying although its policy says otherwise; None where it does not."""
        self.counters = CacheCounters()
        self._transfer = transfer_for(device, stream)
        self._rows = RowAccess(self.geometry, self.dtype, self._transfer)
        self._min_bucket = min_bucket
        sizes = {"max_length": max_length, "min_bucket": min_bucket, "step": max(1, commit_ahead)}
        memory = self._memory(pool)
        self._growth = make_growth(self.policy, self.geometry, self._transfer, memory, budget, **sizes)
        self._sharing = Sharing(self.geometry, self._growth, self._transfer)
        self._ahead = CommitAhead(self._growth, self.backing, commit_ahead) if self.backing is not None else None
        self._lengths = [0] * batch
        self._begun = False  # whether `ensure` has made room since all rows were empty
        self._bucket = next_bucket(0, min_bucket, max_length)
        self._bindings = self._bind()
        self._quiet = [0] * batch  # lengths up to which `ensure` has nothing to do, which is most of the time

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.geometry.batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(self._lengths)

    @property
    def capacity(self) -> int:
        """Axis 2 of the bindings."""
        return self._growth.capacity

    @property
    def physical_bytes(self) -> int:
        """Bytes of memory behind the cache: whole granules where they are mapped."""
        return self._growth.physical_bytes

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of memory that rows share with the row that committed them; `physical_bytes` has them there alone."""
        return self.backing.borrowed_bytes if self.backing is not None else 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes of address range held; equal to `physical_bytes` for plain memory."""
        return self._growth.reserved_bytes

    @property
    def backing(self) -> Backing | None:
        """The reservations with their counters; None for plain memory."""
        return self._growth.backing

    def bindings(self, row: int | None = None) -> tuple[Binding, ...]:
        """Where each layer's key and value lie, in this order; `row` asks for one row's part, as a batch of one."""
        return self._bindings if row is None else self._bind(row)

    def signature(self) -> tuple[Binding, ...]:
        """What a captured graph has baked in: it stays valid while this is the same."""
        return self._bindings

    def ensure(self, lengths: Sequence[int]) -> GrowthEvent | None:
        """Make room for `lengths[b]` tokens of each row; a row is never made shorter.

        Raises:
            CapacityError: a row would be longer than `max_length`.
            OutOfMemoryError, DriverError: the memory cannot be had. The rows are as they were.
        """
        if len(lengths) == self.batch and all(
            old <= new <= quiet for old, new, quiet in zip(self._lengths, lengths, self._quiet, strict=True)
        ):
            self._lengths = list(lengths)
            self._begun = True
            return None
        wanted = self._checked(lengths)
        self._detach([old if new > old else None for old, new in zip(self._lengths, wanted, strict=True)])
        event = self._make_room(wanted)
        self._lengths = wanted
        self._begun = any(wanted)
        return event

    def start(self, row: int, source: KvCache, tokens: int, source_row: int = 0) -> Start:
        """Let an empty row begin with the first `tokens` of a row of `source`, which may be this cache.

        Whole granules are mapped a second time and charged once; the rest, or all with the reason told, is copied.
        `source` may go on and be closed; it and this cache are used from the same thread while this runs.

        Raises:
            ConfigError: the row is not empty, or the caches differ in what a row is. Nothing changed.
            CapacityError: the row does not fit here, or `source` does not have that many tokens. Nothing changed.
            OutOfMemoryError, DriverError: the memory cannot be had. The row is empty.
        """
        if self._lengths[row]:
            raise ConfigError(f"row {row} has {self._lengths[row]} tokens; only an empty row starts from another's")
        mine, its = self.geometry, source.geometry
        if (mine.layout, mine.layers, self.dtype, self.device) != (its.layout, its.layers, source.dtype, source.device):
            raise ConfigError("a row can only start from a cache of the same layers, layout, dtype and device")
        if not 0 < tokens <= source.lengths[source_row]:
            raise CapacityError(f"{tokens} tokens of a row of {source.lengths[source_row]} cannot be started from")
        wanted = list(self._lengths)
        wanted[row] = tokens
        wanted = self._checked(wanted)
        self._detach([0 if index == row else None for index in range(self.batch)])  # what an earlier start left
        start = self._sharing.map(row, source._sharing, source_row, tokens)
        if self._ahead is not None:
            self._ahead.restart()
        self._make_room(wanted)
        copied = self._sharing.copy(row, source._sharing, source_row, tokens, start.decline_reason is None)
        self._lengths = wanted
        self._quiet = [0] * self.batch
        self.counters.shared_starts += start.decline_reason is None
        self.counters.copied_starts += start.decline_reason is not None
        return dataclasses.replace(start, copied_bytes=copied)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of each row. Memory stays.

        Raises:
            CapacityError: a row does not have that many tokens.
        """
        if len(lengths) != self.batch or any(
            not 0 <= new <= old for new, old in zip(lengths, self._lengths, strict=True)
        ):
            raise CapacityError(f"rows of {self._lengths} tokens cannot be rewound to {list(lengths)}")
        self._lengths = list(lengths)
        self._begun = self._begun and any(lengths)
        if any(self._sharing.reaches(row, length) for row, length in enumerate(lengths)):
            self._quiet = [0] * self.batch  # the next token is written where others read

    def reset(self) -> None:
        """Forget all tokens. Memory stays."""
        self.rewind([0] * self.batch)

    def trim(self) -> int:
        """Give back the memory that the present tokens do not need; return how many bytes that were.

        Buckets shrink, so bindings may change. The device gets back what its pool has idle.
        """
        before = self.physical_bytes
        self._transfer.synchronize()
        try:
            self._growth.trim(self._lengths)
        finally:
            self._bindings = self._bind()
            self._quiet = [0] * self.batch
        self._bucket = next_bucket(max(self._lengths), self._min_bucket, self.max_length)
        if self.backing is not None and self._ahead is not None:
            self._ahead.restart()
            self.backing.pool.trim()
        return before - self.physical_bytes

    def read(self, layer: int, side: Side) -> npt.NDArray[Any]:
        """Copy a binding to the host, as BNSH with as many tokens as the longest row; shorter rows end in zeros."""
        heads, dim = self.geometry.layers[layer].kv_heads, self.geometry.layers[layer].head_dim
        result = np.zeros((self.batch, heads, max(self._lengths), dim), self.dtype)
        for row, length in enumerate(self._lengths):
            result[row, :, :length] = self.read_row(layer, side, row)
        return result

    def read_row(self, layer: int, side: Side, row: int) -> npt.NDArray[Any]:
        """Copy one row of a binding to the host: `[kv_heads, tokens, head_dim]`."""
        return self._rows.read(self._growth, layer, side, row, self._lengths[row])

    def write(self, values: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]], lengths: Sequence[int]) -> None:
        """Replace all rows by the given keys and values: `lengths[b]` tokens of each BNSH array.

        Args:
            values: key and value of each layer, `[batch, kv_heads, tokens, head_dim]` in the cache's dtype.
            lengths: tokens of each row, at most those of the arrays.

        Raises:
            ConfigError: the arrays do not fit the cache; nothing changed.
        """
        if len(values) != len(self.geometry.layers):
            raise ConfigError(f"{len(values)} layers given for a cache of {len(self.geometry.layers)}")
        for layer, (shape, pair) in enumerate(zip(self.geometry.layers, values, strict=True)):
            for side, array in zip(Side, pair, strict=True):
                expected = (self.batch, shape.kv_heads, max(lengths), shape.head_dim)
                fits = array.ndim == 4 and array.shape[:2] == expected[:2] and array.shape[3] == expected[3]
                if not fits or array.shape[2] < expected[2] or array.dtype != self.dtype:
                    raise ConfigError(
                        f"{side.name.lower()} of layer {layer} is {array.dtype}{list(array.shape)}; the cache needs "
                        f"{self.dtype}{list(expected)} with that many tokens or more"
                    )
        self.replace(lengths, lambda layer, side, row: values[layer][side][row, :, : lengths[row]])

    def replace(self, lengths: Sequence[int], source: Callable[[int, Side, int], npt.NDArray[Any]]) -> None:
        """Replace all rows by what `source(layer, side, row)` returns: `[kv_heads, lengths[row], head_dim]`.

        Raises:
            CapacityError, OutOfMemoryError, DriverError: there is no room; the rows are as they were. A driver error
                while the new values are written leaves the cache empty.
        """
        wanted = self._checked(lengths, grow_only=False)
        self._detach([0] * self.batch)
        self._make_room([max(pair) for pair in zip(wanted, self._lengths, strict=True)])
        self._lengths = [0] * self.batch
        for layer in range(len(self.geometry.layers)):
            for side in Side:
                for row, length in enumerate(wanted):
                    if length:
                        self._rows.write(self._growth, layer, side, row, source(layer, side, row))
        self._lengths = wanted
        self._begun = any(wanted)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back memory and addresses, and the pool's idle memory to the device; a second call does nothing."""
        self._transfer.synchronize()
        self._growth.close()
        if self.backing is not None:
            self.backing.pool.trim()

    def _memory(self, pool: MemoryPool | None) -> MemoryPool | str:
        """Where the cache's memory comes from: a pool, or the device's plain memory."""
        if self.policy is GrowthPolicy.REALLOC:
            return self.device
        try:
            return pool or MemoryPool.shared(self.device)
        except UnsupportedError as error:
            self.decline_reason = str(error)
            return self.device

    def _checked(self, lengths: Sequence[int], *, grow_only: bool = True) -> list[int]:
        if len(lengths) != self.batch or min(lengths) < 0:
            raise ConfigError(f"lengths {list(lengths)} are not those of a cache of {self.batch} rows")
        if max(lengths) > self.max_length:
            raise CapacityError(
                f"{max(lengths)} tokens do not fit: the cache was made for at most {self.max_length} a sequence"
            )
        return [max(pair) for pair in zip(lengths, self._lengths, strict=True)] if grow_only else list(lengths)

    def _detach(self, starts: Sequence[int | None]) -> None:
        """Let nothing from token `starts[b]` of each row on lie in memory that others read; None leaves a row alone."""
        for row, (start, length) in enumerate(zip(starts, self._lengths, strict=True)):
            if start is None or not self._sharing.reaches(row, start):
                continue
            self._quiet = [0] * self.batch
            try:
                self.counters.detached_granules += self._sharing.detach(row, start, length)
            except NativeError as error:
                raise type(error)(
                    f"row {row} cannot be written to from token {start} on, which it shares with other rows: {error}"
                ) from error

    def _make_room(self, wanted: Sequence[int]) -> GrowthEvent | None:
        longest, bucket, before = max(wanted), self._bucket, self._bindings
        moved = Moved(0, 0)
        if not self._growth.covers(wanted):
            moved = self._grow(wanted)
        elif self._ahead is not None:
            self._ahead.step(wanted)
        self._quiet = [
            length if self._sharing.reaches(row, length) else quiet  # a row's first write into its prefix is not quiet
            for row, (length, quiet) in enumerate(zip(wanted, self._quiet_lengths(wanted), strict=True))
        ]
        if longest <= bucket:
            return None
        self._bucket = next_bucket(longest, self._min_bucket, self.max_length)
        if not self._begun:
            return None  # the bucket that holds the prompt is no growth
        event = GrowthEvent(bucket, self._bucket, moved.nbytes, moved.copied, before, self._bindings)
        self.counters.growth_events += 1
        self.counters.growth_keeps += event.kept
        self.counters.bytes_moved += event.bytes_moved
        self.counters.bytes_copied += event.bytes_copied
        return event

    def _grow(self, wanted: Sequence[int]) -> Moved:
        place = self.capacity, self._growth.addresses
        try:
            moved = self._growth.grow(self._lengths, wanted)
        except NativeError as error:
            raise type(error)(
                f"the cache cannot grow from {max(self._lengths)} to {max(wanted)} tokens (batch {self.batch}, "
                f"{self.physical_bytes:,} bytes held): {error}"
            ) from error
        if (
            self.capacity,
            self._growth.addresses,
        ) != place:  # an equal signature stays the same object: cheap to compare
            self._bindings = self._bind()
        return moved

    def _quiet_lengths(self, lengths: Sequence[int]) -> list[int]:
        boundaries = self._growth.boundaries(lengths)
        if self._ahead is None or not boundaries:
            return [min(self._bucket, self.capacity)] * self.batch
        ends = [self._ahead.quiet_until(part, at) for part, (at, _) in enumerate(boundaries)]
        return [min(self._bucket, end) for end in (ends if len(ends) == self.batch else ends * self.batch)]

    def _bind(self, row: int | None = None) -> tuple[Binding, ...]:
        geometry, capacity, addresses = self.geometry, self.capacity, self._growth.addresses
        rows, bindings = geometry.batch if row is None else 1, []
        for layer, shape in enumerate(geometry.layers):
            skipped = strides(geometry.layout, geometry.layers, layer, capacity).batch * (row or 0)
            for side in Side:
                reservation, offset = geometry.binding(layer, side)
                address = addresses[reservation] + offset + skipped * self.dtype.itemsize
                bindings.append(Binding(address, (rows, shape.kv_heads, capacity, shape.head_dim)))
        return tuple(bindings)
