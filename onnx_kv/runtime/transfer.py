"""Moving cache bytes: within the device's memory, and between it and numpy arrays. Addresses are absolute."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

from onnx_kv.cuda import CopyKind, PitchedCopy, Stream, device_ordinal
from onnx_kv.cuda import Move as NativeMove
from onnx_kv.errors import ConfigError
from onnx_kv.geometry import Move
from onnx_kv.memory import host_copy_pitched, host_move


class Transfer(Protocol):
    """One device's way to move bytes."""

    def move(self, moves: Sequence[Move]) -> None:
        """Copy within the device's memory, one after another, each as memmove does. Queued after earlier work."""

    def read(self, copies: Sequence[PitchedCopy]) -> None:
        """Copy from the device's memory to the host's; returns when it is done."""

    def write(self, copies: Sequence[PitchedCopy]) -> None:
        """Copy from the host's memory to the device's; returns when it is done."""

    def synchronize(self) -> None:
        """Wait until no work in flight touches the device's memory."""


class HostTransfer:
    """The host's own memory: every call returns when it is done."""

    def move(self, moves: Sequence[Move]) -> None:
        """See `Transfer`."""
        host_move(_array(moves), len(moves))

    def read(self, copies: Sequence[PitchedCopy]) -> None:
        """See `Transfer`."""
        host_copy_pitched((PitchedCopy * len(copies))(*copies), len(copies))

    write = read

    def synchronize(self) -> None:
        """See `Transfer`."""


class CudaTransfer:
    """A device's memory, on the stream that all work on the cache is queued on."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def move(self, moves: Sequence[Move]) -> None:
        """See `Transfer`."""
        self._stream.move(_array(moves))

    def read(self, copies: Sequence[PitchedCopy]) -> None:
        """See `Transfer`."""
        self._stream.copy_pitched(copies, CopyKind.DEVICE_TO_HOST)
        self._stream.synchronize()

    def write(self, copies: Sequence[PitchedCopy]) -> None:
        """See `Transfer`."""
        self._stream.copy_pitched(copies, CopyKind.HOST_TO_DEVICE)
        self._stream.synchronize()

    def synchronize(self) -> None:
        """See `Transfer`."""
        self._stream.synchronize()


def transfer_for(device: str, stream: Stream | None) -> Transfer:
    """The transfer of `cpu`, or of a CUDA device on `stream`.

    Raises:
        ConfigError: a CUDA device without a stream of its own.
    """
    ordinal = device_ordinal(device)
    if ordinal is None:
        return HostTransfer()
    if stream is None or stream.device != ordinal:
        raise ConfigError(f"a cache on {device} needs the stream of that device on which its model runs")
    return CudaTransfer(stream)


def _array(moves: Sequence[Move]) -> ctypes.Array[NativeMove]:
    return (NativeMove * len(moves))(*(NativeMove(*move) for move in moves))
