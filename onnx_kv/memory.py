"""Reservations of address space, the pools of granules behind them, and the budget that a device's caches share.

A `Reservation` is a range of addresses that costs nothing; committing bytes of it maps whole *granules* of memory
there (2 MiB on NVIDIA data-centre GPUs, a page on the host unless asked otherwise). A `MemoryPool` makes the granules
of one device, keeps those that were released for the next commit, and gives them back when trimmed. A `MemoryBudget`
bounds how many bytes may be committed: a commit claims what it newly maps, and nothing else does.

Every operation is all or nothing over all the spans it is given: a refused budget or a failed driver call raises a
typed error and leaves everything as it was. Touching bytes that are not committed faults; committed bytes are undefined
until written.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onnx_kv._native import function
from onnx_kv.cuda import Move, PitchedCopy, device_ordinal
from onnx_kv.errors import ConfigError, OutOfMemoryError

_U64, _Handle = ctypes.c_uint64, ctypes.c_void_p
_P64 = ctypes.POINTER(_U64)


class _Span(ctypes.Structure):
    _fields_ = (("reservation", _Handle), ("offset", _U64), ("bytes", _U64))


class _Counters(ctypes.Structure):
    _fields_ = tuple(
        (name, _U64)
        for name in (
            "granule_bytes",
            "reserved_bytes",
            "physical_bytes",
            "idle_bytes",
            "creates",
            "maps",
            "unmaps",
            "map_ns",
        )
    )


_pool_create_host = function("onnx_kv_pool_create_host", _U64, ctypes.POINTER(_Handle))
_pool_create_cuda = function("onnx_kv_pool_create_cuda", ctypes.c_int32, _U64, ctypes.POINTER(_Handle))
_pool_destroy = function("onnx_kv_pool_destroy", _Handle)
_pool_trim = function("onnx_kv_pool_trim", _Handle, _U64, _P64)
_pool_counters = function("onnx_kv_pool_counters", _Handle, ctypes.POINTER(_Counters))
_pool_fail_after = function("onnx_kv_pool_fail_after", _Handle, ctypes.c_int64)
_reservation_create = function("onnx_kv_reservation_create", _Handle, _U64, ctypes.POINTER(_Handle), _P64, _P64)
_reservation_destroy = function("onnx_kv_reservation_destroy", _Handle, _P64)
_missing = function("onnx_kv_memory_missing", _Handle, ctypes.POINTER(_Span), _U64, _P64)
_commit = function("onnx_kv_memory_commit", _Handle, ctypes.POINTER(_Span), _U64, _P64)
_decommit = function("onnx_kv_memory_decommit", _Handle, ctypes.POINTER(_Span), _U64, _P64, _P64)
_share = function("onnx_kv_memory_share", _Handle, ctypes.POINTER(_Span), ctypes.POINTER(_Span), _U64)
_shared = function("onnx_kv_memory_shared", _Handle, ctypes.POINTER(_Span), _P64)
host_move = function("onnx_kv_host_move", ctypes.POINTER(Move), _U64)
host_copy_pitched = function("onnx_kv_host_copy_pitched", ctypes.POINTER(PitchedCopy), _U64)


@dataclass(frozen=True)
class MemoryCounters:
    """What a pool has done since it was made, and holds now."""

    granule_bytes: int
    reserved_bytes: int
    """Address space of the reservations alive."""
    physical_bytes: int
    """Memory taken from the driver: granules in existence."""
    idle_bytes: int
    """Of these, granules that nothing maps, kept for the next commit."""
    creates: int
    """Granules made; the dearest call."""
    maps: int
    unmaps: int
    map_ns: int
    """Host nanoseconds spent in commits and shares."""

    @property
    def committed_bytes(self) -> int:
        """Granules that are mapped somewhere; one mapped at several addresses counts once."""
        return self.physical_bytes - self.idle_bytes


class MemoryBudget:
    """Bytes that the caches of a device may commit together. Safe for use from several threads.

    Args:
        limit: bytes in all.
        headroom: bytes of `limit` that caches leave alone, for the workspace of a prefill.
        setting: what to raise when a claim is refused, as the user knows it.
    """

    def __init__(self, limit: int, *, headroom: int = 0, setting: str = "budget") -> None:
        if not 0 <= headroom <= limit:
            raise ConfigError(f"a budget of {limit} bytes cannot keep {headroom} bytes of headroom")
        self.limit = limit
        self.headroom = headroom
        self.setting = setting
        self._held = 0
        self._lock = threading.RLock()  # re-entrant: a finalizer may release while this thread claims

    @property
    def held(self) -> int:
        """Bytes claimed now."""
        return self._held

    @property
    def free(self) -> int:
        """Bytes that a claim may still take."""
        return self.limit - self.headroom - self._held

    def claim(self, nbytes: int) -> None:
        """Take `nbytes`.

        Raises:
            OutOfMemoryError: fewer are free; nothing was taken.
        """
        with self._lock:
            if nbytes > self.free:
                raise OutOfMemoryError(
                    f"the memory budget refuses {nbytes:,} bytes: {self._held:,} are held and {self.free:,} free of "
                    f"{self.limit:,}, of which {self.headroom:,} stay free for workspace; raise {self.setting}"
                )
            self._held += nbytes

    def release(self, nbytes: int) -> None:
        """Give back `nbytes` that were claimed."""
        with self._lock:
            self._held -= nbytes


class Span(NamedTuple):
    """Bytes `[start, end)` of a reservation."""

    reservation: Reservation
    start: int
    end: int


class Released(NamedTuple):
    """What a decommit did: bytes unmapped, and bytes of granules that nothing maps any more."""

    unmapped: int
    freed: int


class MemoryPool:
    """The granules of one device.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        granule: bytes of a granule, a multiple of the device's own; None for the device's own.

    Raises:
        UnsupportedError: the device has no virtual memory management.
        ConfigError: no such device, or the granule does not fit it.
    """

    def __init__(self, device: str = "cpu", granule: int | None = None) -> None:
        handle = _Handle()
        ordinal = device_ordinal(device)
        if ordinal is None:
            _pool_create_host(granule or 0, ctypes.byref(handle))
        else:
            _pool_create_cuda(ordinal, granule or 0, ctypes.byref(handle))
        self.device = device
        self._handle = handle
        self._close = weakref.finalize(self, _pool_destroy, handle)
        self.granule = self.counters().granule_bytes

    @staticmethod
    def shared(device: str) -> MemoryPool:
        """The process's pool of a device: what one cache releases, the next one takes."""
        return _shared_pool(device_ordinal(device))

    def reserve(self, nbytes: int, budget: MemoryBudget | None = None) -> Reservation:
        """Reserve address space for `nbytes`, rounded up to granules; commits in it are charged to `budget`."""
        return Reservation(self, nbytes, budget)

    def missing(self, spans: Sequence[Span]) -> int:
        """Bytes of granules that `commit(spans)` would newly map."""
        granules = _U64()
        _missing(self._handle, _spans(spans), len(spans), ctypes.byref(granules))
        return granules.value * self.granule

    def commit(self, spans: Sequence[Span]) -> int:
        """Back every granule-sized window that a span touches; return the bytes that were not backed before.

        Spans of one reservation follow each other in ascending order, and all reservations have the same budget.

        Raises:
            OutOfMemoryError: the budget, the device or the host refused. Nothing changed.
            DriverError: a driver call failed. Nothing changed.
        """
        if not spans:
            return 0
        budget = spans[0].reservation.budget
        claimed = 0
        if budget is not None:
            claimed = self.missing(spans)
            budget.claim(claimed)
        granules = _U64()
        try:
            _commit(self._handle, _spans(spans), len(spans), ctypes.byref(granules))
        except BaseException:
            if budget is not None:
                budget.release(claimed)
            raise
        return granules.value * self.granule

    def decommit(self, spans: Sequence[Span]) -> Released:
        """Unmap every window that lies wholly within a span; the granules go back to the pool.

        The caller has waited for all work that may touch these bytes.
        """
        if not spans:
            return Released(0, 0)
        unmapped, freed = _U64(), _U64()
        _decommit(self._handle, _spans(spans), len(spans), ctypes.byref(unmapped), ctypes.byref(freed))
        released = Released(unmapped.value * self.granule, freed.value * self.granule)
        budget = spans[0].reservation.budget
        if budget is not None:
            budget.release(released.freed)
        return released

    def share(self, sources: Sequence[Span], targets: Sequence[Span]) -> None:
        """Map the granules of each source, which is committed, at its target, which is not. Charges nothing.

        Spans consist of whole granules. A granule stays until nothing maps it, and whoever writes through one mapping
        changes what the others read.
        """
        if len(sources) != len(targets):
            raise ConfigError(f"{len(sources)} sources cannot be mapped at {len(targets)} targets")
        _share(self._handle, _spans(sources), _spans(targets), len(sources))

    def shared_bytes(self, span: Span) -> int:
        """Bytes of the windows touched by a span whose granules are mapped elsewhere too."""
        granules = _U64()
        _shared(self._handle, _spans([span]), ctypes.byref(granules))
        return granules.value * self.granule

    def trim(self, keep: int = 0) -> int:
        """Give idle granules back to the driver until at most `keep` bytes of them remain; return the bytes given."""
        released = _U64()
        _pool_trim(self._handle, keep, ctypes.byref(released))
        return released.value

    def counters(self) -> MemoryCounters:
        """A snapshot of the pool's counters."""
        raw = _Counters()
        _pool_counters(self._handle, ctypes.byref(raw))
        return MemoryCounters(**{field[0]: getattr(raw, field[0]) for field in _Counters._fields_})

    def fail_after(self, calls: int) -> None:
        """For tests: let `calls` more driver calls through and fail the one after them; negative means never."""
        _pool_fail_after(self._handle, calls)


@functools.cache
def _shared_pool(ordinal: int | None) -> MemoryPool:
    return MemoryPool("cpu" if ordinal is None else f"cuda:{ordinal}")


class Reservation:
    """A range of addresses of one device; see `MemoryPool.reserve`. Closed by `close()` or with its last reference."""

    def __init__(self, pool: MemoryPool, nbytes: int, budget: MemoryBudget | None) -> None:
        handle, address, reserved = _Handle(), _U64(), _U64()
        _reservation_create(pool._handle, nbytes, ctypes.byref(handle), ctypes.byref(address), ctypes.byref(reserved))
        self.pool = pool
        self.budget = budget
        self.address = address.value
        self.nbytes = reserved.value
        self._handle = handle
        self._close = weakref.finalize(self, _close_reservation, handle, pool.granule, budget)

    def span(self, start: int = 0, end: int | None = None) -> Span:
        """Bytes `[start, end)` of this reservation; by default all of them."""
        return Span(self, start, self.nbytes if end is None else end)

    def close(self) -> None:
        """Unmap everything and give the addresses back; a second call does nothing. The caller has waited for work."""
        self._close()


def _close_reservation(handle: ctypes.c_void_p, granule: int, budget: MemoryBudget | None) -> None:
    freed = _U64()
    _reservation_destroy(handle, ctypes.byref(freed))
    if budget is not None:
        budget.release(freed.value * granule)


def _spans(spans: Sequence[Span]) -> ctypes.Array[_Span]:
    array = (_Span * len(spans))()
    for item, (reservation, start, end) in zip(array, spans, strict=True):
        if not reservation._close.alive:
            raise ConfigError("this reservation is closed")
        if not 0 <= start <= end:
            raise ConfigError(f"bytes {start} to {end} are not a range")
        item.reservation, item.offset, item.bytes = reservation._handle, start, end - start
    return array
