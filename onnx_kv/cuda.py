"""CUDA without a toolkit: streams, buffers, events and captured graphs of one device, as Python objects.

Everything lives in the device's primary context, which ONNX Runtime shares. Addresses and handles are plain integers,
so that they can be handed to ONNX Runtime (`user_compute_stream`, I/O binding). Work is asynchronous: a call that takes
a stream returns once the work is queued, and the arrays and buffers it names must stay alive until it is done.

Objects own their handle: they release it at `close()`, at the end of a `with` block, or with their last reference.
Every failure is a typed error: `UnsupportedError` (no driver), `ConfigError` (no such device), `OutOfMemoryError`,
`DriverError` (any other driver status, named).
"""

from __future__ import annotations

import ctypes
import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from onnx_kv._native import function
from onnx_kv.errors import ConfigError, UnsupportedError

_I32, _U64 = ctypes.c_int32, ctypes.c_uint64
_P32, _P64 = ctypes.POINTER(_I32), ctypes.POINTER(_U64)


class _DeviceInfo(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("total_bytes", _U64),
        ("compute_major", _I32),
        ("compute_minor", _I32),
        ("multiprocessors", _I32),
        ("virtual_memory", _I32),
        ("driver_version", _I32),
    )


class CopyKind(enum.IntEnum):
    """Between which memories a copy runs."""

    HOST_TO_DEVICE = 0
    DEVICE_TO_HOST = 1
    DEVICE_TO_DEVICE = 2


class PitchedCopy(ctypes.Structure):
    """`height` rows of `width` bytes, each row's start `*_pitch` bytes after the last; the two ends are disjoint."""

    _fields_ = (
        ("destination", _U64),
        ("destination_pitch", _U64),
        ("source", _U64),
        ("source_pitch", _U64),
        ("width", _U64),
        ("height", _U64),
    )


class Move(ctypes.Structure):
    """`nbytes` from address `source` to address `destination`, which may overlap, as in memmove."""

    _fields_ = (("source", _U64), ("destination", _U64), ("nbytes", _U64))


_device_count = function("onnx_kv_cuda_device_count", _P32)
_device_info = function("onnx_kv_cuda_device_info", _I32, ctypes.POINTER(_DeviceInfo))
_memory_info = function("onnx_kv_cuda_memory_info", _I32, _P64, _P64)
_synchronize = function("onnx_kv_cuda_synchronize", _I32)
_stream_create = function("onnx_kv_cuda_stream_create", _I32, _P64)
_stream_destroy = function("onnx_kv_cuda_stream_destroy", _I32, _U64)
_stream_synchronize = function("onnx_kv_cuda_stream_synchronize", _I32, _U64)
_stream_query = function("onnx_kv_cuda_stream_query", _I32, _U64, _P32)
_copy = function("onnx_kv_cuda_copy", _I32, _U64, _U64, _U64, _U64, _I32)
_copy_pitched = function("onnx_kv_cuda_copy_pitched", _I32, _U64, ctypes.POINTER(PitchedCopy), _U64, _I32)
_move = function("onnx_kv_cuda_move", _I32, _U64, ctypes.POINTER(Move), _U64)
_fill = function("onnx_kv_cuda_fill", _I32, _U64, _U64, ctypes.c_uint8, _U64)
_event_create = function("onnx_kv_cuda_event_create", _I32, _P64)
_event_destroy = function("onnx_kv_cuda_event_destroy", _I32, _U64)
_event_record = function("onnx_kv_cuda_event_record", _I32, _U64, _U64)
_event_query = function("onnx_kv_cuda_event_query", _I32, _U64, _P32)
_event_synchronize = function("onnx_kv_cuda_event_synchronize", _I32, _U64)
_event_elapsed = function("onnx_kv_cuda_event_elapsed", _I32, _U64, _U64, ctypes.POINTER(ctypes.c_float))
_buffer_create = function("onnx_kv_cuda_buffer_create", _I32, _U64, _P64)
_buffer_destroy = function("onnx_kv_cuda_buffer_destroy", _I32, _U64)
_pinned_create = function("onnx_kv_cuda_pinned_create", _I32, _U64, _P64)
_pinned_destroy = function("onnx_kv_cuda_pinned_destroy", _I32, _U64)
_capture_begin = function("onnx_kv_cuda_capture_begin", _I32, _U64)
_capture_end = function("onnx_kv_cuda_capture_end", _I32, _U64, _P64, _P64)
_capture_abort = function("onnx_kv_cuda_capture_abort", _I32, _U64)
_graph_upload = function("onnx_kv_cuda_graph_upload", _I32, _U64, _U64)
_graph_launch = function("onnx_kv_cuda_graph_launch", _I32, _U64, _U64)
_graph_destroy = function("onnx_kv_cuda_graph_destroy", _I32, _U64)


@dataclass(frozen=True)
class DeviceInfo:
    """What the driver says about a device; `virtual_memory` tells whether reservations can be backed by granules."""

    ordinal: int
    name: str
    total_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    virtual_memory: bool
    driver_version: int


def device_count() -> int:
    """Number of CUDA devices; 0 on a machine without a driver."""
    count = _I32()
    try:
        _device_count(ctypes.byref(count))
    except UnsupportedError:
        return 0
    return count.value


def device_ordinal(device: str) -> int | None:
    """The ordinal that a device's name means: None for `cpu`, 0 for `cuda`, N for `cuda:N`.

    Raises:
        ConfigError: the name is none of these.
    """
    kind, _, ordinal = device.partition(":")
    if device == "cpu":
        return None
    if kind != "cuda" or (":" in device and not ordinal.isdecimal()):
        raise ConfigError(f"no device is called {device!r}; use cpu, cuda or cuda:N")
    return int(ordinal or 0)


def device_info(device: int = 0) -> DeviceInfo:
    """Describe a device."""
    info = _DeviceInfo()
    _device_info(device, ctypes.byref(info))
    return DeviceInfo(
        ordinal=device,
        name=info.name.decode(errors="replace"),
        total_bytes=info.total_bytes,
        compute_capability=(info.compute_major, info.compute_minor),
        multiprocessors=info.multiprocessors,
        virtual_memory=bool(info.virtual_memory),
        driver_version=info.driver_version,
    )


def memory_info(device: int = 0) -> tuple[int, int]:
    """Bytes free and bytes in all, as the driver sees the device now."""
    free, total = _U64(), _U64()
    _memory_info(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def synchronize(device: int = 0) -> None:
    """Wait for all work of the device's primary context."""
    _synchronize(device)


class _Owned:
    """A native handle with one owner, released once."""

    def __init__(self, device: int, handle: int, destroy: Callable[[int, int], None]) -> None:
        self.device = device
        self._handle = handle
        self._release = weakref.finalize(self, destroy, device, handle)

    @property
    def handle(self) -> int:
        """The driver's own handle.

        Raises:
            ConfigError: the object was closed.
        """
        if not self._release.alive:
            raise ConfigError(f"this {type(self).__name__} is closed")
        return self._handle

    def close(self) -> None:
        """Release the handle; a second call does nothing."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _create(create: Callable[..., None], *args: int) -> int:
    handle = _U64()
    create(*args, ctypes.byref(handle))
    return handle.value


class Stream(_Owned):
    """A non-blocking stream: it is not ordered with the legacy default stream."""

    def __init__(self, device: int = 0) -> None:
        super().__init__(device, _create(_stream_create, device), _stream_destroy)

    def synchronize(self) -> None:
        """Wait until the stream's work is done; errors of that work surface here."""
        _stream_synchronize(self.device, self.handle)

    @property
    def done(self) -> bool:
        """Whether all the stream's work is done, without waiting."""
        done = _I32()
        _stream_query(self.device, self.handle, ctypes.byref(done))
        return bool(done.value)

    def copy(self, destination: int, source: int, nbytes: int, kind: CopyKind) -> None:
        """Queue a copy of `nbytes` between two disjoint addresses."""
        _copy(self.device, self.handle, destination, source, nbytes, kind)

    def copy_pitched(self, copies: Sequence[PitchedCopy], kind: CopyKind) -> None:
        """Queue copies of strided blocks, in order."""
        array = (PitchedCopy * len(copies))(*copies)
        _copy_pitched(self.device, self.handle, array, len(copies), kind)

    def move(self, moves: ctypes.Array[Move]) -> None:
        """Queue moves within device memory, in order. Waits for the stream if one of them overlaps itself."""
        _move(self.device, self.handle, moves, len(moves))

    def fill(self, destination: int, byte: int, nbytes: int) -> None:
        """Queue setting `nbytes` bytes to one value."""
        _fill(self.device, self.handle, destination, byte, nbytes)

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Record what the block queues on this stream instead of running it; `.graph` is set when the block ends.

        An error in the block, or one that made the recording invalid, ends the capture and is raised; the stream is
        usable afterwards and nothing of the block ran.
        """
        device, handle = self.device, self.handle
        _capture_begin(device, handle)
        capture = Capture()
        try:
            yield capture
            graph, nodes = _U64(), _U64()
            _capture_end(device, handle, ctypes.byref(graph), ctypes.byref(nodes))
        except BaseException:
            _capture_abort(device, handle)
            raise
        capture.graph = CapturedGraph(self.device, graph.value, nodes.value)


class Capture:
    """The result of a `Stream.capture` block."""

    graph: CapturedGraph


class CapturedGraph(_Owned):
    """An instantiated graph: the captured work, launched again by one driver call. `nodes` counts its operations."""

    def __init__(self, device: int, handle: int, nodes: int) -> None:
        super().__init__(device, handle, _graph_destroy)
        self.nodes = nodes

    def launch(self, stream: Stream) -> None:
        """Queue the captured work on `stream`; the host does not wait."""
        _graph_launch(self.device, self.handle, stream.handle)

    def upload(self, stream: Stream) -> None:
        """Send the graph to the device ahead of its first launch, so that the launch does not pay for it."""
        _graph_upload(self.device, self.handle, stream.handle)


class Event(_Owned):
    """A point in a stream's work."""

    def __init__(self, device: int = 0) -> None:
        super().__init__(device, _create(_event_create, device), _event_destroy)

    def record(self, stream: Stream) -> None:
        """Put the event after the work that `stream` holds now."""
        _event_record(self.device, self.handle, stream.handle)

    @property
    def done(self) -> bool:
        """Whether the recorded point has passed, without waiting."""
        done = _I32()
        _event_query(self.device, self.handle, ctypes.byref(done))
        return bool(done.value)

    def synchronize(self) -> None:
        """Wait until the recorded point has passed."""
        _event_synchronize(self.device, self.handle)

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds of device time from `since` to this event; both must have passed."""
        elapsed = ctypes.c_float()
        _event_elapsed(self.device, since.handle, self.handle, ctypes.byref(elapsed))
        return elapsed.value


class Buffer(_Owned):
    """Plain device memory. Its content is undefined until written."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        handle = _create(_buffer_create, device, nbytes)
        super().__init__(device, handle, _buffer_destroy)
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return self.handle

    def write(self, array: npt.NDArray[Any], stream: Stream, offset: int = 0) -> None:
        """Queue a copy of a C-contiguous host array into the buffer, `offset` bytes from its start."""
        self._check(array, offset)
        stream.copy(self.address + offset, array.ctypes.data, array.nbytes, CopyKind.HOST_TO_DEVICE)

    def read(self, array: npt.NDArray[Any], stream: Stream, offset: int = 0) -> None:
        """Queue a copy of the buffer's bytes from `offset` into a C-contiguous host array, which it fills."""
        self._check(array, offset)
        stream.copy(array.ctypes.data, self.address + offset, array.nbytes, CopyKind.DEVICE_TO_HOST)

    def _check(self, array: npt.NDArray[Any], offset: int) -> None:
        if not array.flags.c_contiguous or offset < 0 or offset + array.nbytes > self.nbytes:
            raise ConfigError(
                f"a copy of {array.nbytes} bytes at offset {offset} needs a C-contiguous array and must fit in the "
                f"buffer's {self.nbytes} bytes"
            )


class PinnedBuffer(_Owned):
    """Host memory that the device copies from and to without a staging copy."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        handle = _create(_pinned_create, device, nbytes)
        super().__init__(device, handle, _pinned_destroy)
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        """Host address of the first byte."""
        return self.handle

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """A numpy view of the buffer's start, valid until the buffer is closed."""
        wanted = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if count * wanted.itemsize > self.nbytes:
            raise ConfigError(f"an array of {count * wanted.itemsize} bytes does not fit in {self.nbytes} bytes")
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        return np.frombuffer(memoryview(memory), dtype=wanted, count=count).reshape(shape)


def copy_to_device(array: npt.NDArray[Any], stream: Stream) -> Buffer:
    """Return a new buffer that holds a C-contiguous host array's bytes, already there."""
    buffer = Buffer(max(array.nbytes, 1), stream.device)
    buffer.write(array, stream)
    stream.synchronize()
    return buffer


def copy_to_host(buffer: Buffer, dtype: npt.DTypeLike, shape: tuple[int, ...], stream: Stream) -> npt.NDArray[Any]:
    """Return the start of a buffer as a new host array, after all earlier work of the stream."""
    array = np.empty(shape, dtype)
    buffer.read(array, stream)
    stream.synchronize()
    return array
