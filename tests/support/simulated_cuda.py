"""A CUDA device made of host memory, on which work is done the moment it is queued: the CUDA engine without a GPU.

Runs the engine's own code over ONNX Runtime's CPU provider. A capture records what is queued and a launch does it
again; a launch with other bindings than those recorded, as a stale graph would be, fails.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnx_kv.runtime import cuda_engine
from onnx_kv.runtime.cache import KvCache
from onnx_kv.runtime.cuda_engine import CudaEngine
from onnx_kv.runtime.decoder import Decoder
from onnx_kv.runtime.rows import Engine
from onnx_kv.runtime.sampling import HostSampler, Sampling
from onnx_kv.runtime.stats import Stats


class Buffer:
    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.array = np.full(nbytes, 0xFF, np.uint8)
        self.nbytes, self.address = nbytes, self.array.ctypes.data

    def write(self, array: NDArray[Any], stream: Stream, offset: int = 0) -> None:
        assert array.flags.c_contiguous
        assert offset + array.nbytes <= self.nbytes
        self.array[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)

    def read(self, array: NDArray[Any], stream: Stream, offset: int = 0) -> None:
        array.reshape(-1).view(np.uint8)[:] = self.array[offset : offset + array.nbytes]

    def close(self) -> None:
        pass


class Event:
    def __init__(self, device: int = 0) -> None:
        pass

    def record(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Graph:
    def __init__(self, work: list[Callable[[], None]], signature: Callable[[], object]) -> None:
        self._work, self._signature, self._recorded = work, signature, signature()

    def launch(self, stream: Stream) -> None:
        assert self._signature() == self._recorded, "a graph was kept although what it has baked in has changed"
        for work in self._work:
            work()

    def close(self) -> None:
        pass


class Stream:
    device = 0

    def __init__(self, signature: Callable[[], object]) -> None:
        self._signature = signature
        self._recording: list[Callable[[], None]] | None = None

    def queue(self, work: Callable[[], None]) -> None:
        if self._recording is None:
            work()
        else:
            self._recording.append(work)

    def copy(self, destination: int, source: int, nbytes: int, kind: object) -> None:
        self.queue(lambda: ctypes.memmove(destination, source, nbytes) and None)

    def synchronize(self) -> None:
        assert self._recording is None, "nothing may wait inside a capture"

    @contextlib.contextmanager
    def capture(self) -> Iterator[Any]:
        self._recording = []
        capture = type("Capture", (), {})()
        try:
            yield capture
            capture.graph = Graph(self._recording, self._signature)
        finally:
            self._recording = None


class Sampler:
    """The arrays of `DeviceSampler`, and what its kernel does to them."""

    def __init__(
        self,
        sampling: Sampling,
        rows: int,
        vocab: int,
        dtype: str,
        stream: Stream,
        *,
        mask_slots: int = 0,
        ring: int = 64,
    ) -> None:
        self._stream, self._rows, self._vocab, self._dtype, self._ring_size = stream, rows, vocab, dtype, ring
        self.input_ids, self.position_ids, self.seqlens_k = Buffer(8 * rows), Buffer(8 * rows), Buffer(4 * rows)
        self._slots = mask_slots
        self.attention_mask = Buffer(8 * rows * mask_slots) if mask_slots else None
        self._ring = np.full((rows, ring), -7, np.int64)
        self._live = np.ones(rows, np.int32)
        self._steps = np.zeros(rows, np.int64)
        self.set_sampling(sampling)

    def set_sampling(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def start(self, tokens: Sequence[int], lengths: Sequence[int], slots: int) -> None:
        self._live[:], self._steps[:] = 1, 0
        self._host = HostSampler(self._sampling, self._rows)
        self.input_ids.array.view(np.int64)[:] = tokens
        self.position_ids.array.view(np.int64)[:] = lengths
        self.seqlens_k.array.view(np.int32)[:] = lengths
        self.set_mask(slots, lengths)

    def set_mask(self, slots: int, lengths: Sequence[int]) -> None:
        self._slots = slots
        if self.attention_mask is not None:
            mask = np.arange(slots) <= np.asarray(lengths)[:, None]
            self.attention_mask.array.view(np.int64)[: mask.size] = mask.reshape(-1)

    def hold(self, row: int, token: int, length: int) -> None:
        self._live[row] = 0
        self.input_ids.array.view(np.int64)[row] = token
        self.position_ids.array.view(np.int64)[row] = length
        self.seqlens_k.array.view(np.int32)[row] = length
        if self.attention_mask is not None and length + 1 < self._slots:
            self.attention_mask.array.view(np.int64)[row * self._slots + length + 1] = 0

    def choose(self, logits: int, row_stride: int) -> None:
        assert row_stride == self._vocab
        self._stream.queue(lambda: self._choose(logits))

    def _choose(self, logits: int) -> None:
        size = self._rows * self._vocab * np.dtype(self._dtype).itemsize
        values = np.frombuffer((ctypes.c_uint8 * size).from_address(logits), self._dtype).reshape(self._rows, -1)
        for row in np.flatnonzero(self._live):
            token = self._host.choose(values, [row])[0]
            self._ring[row, self._steps[row] % self._ring_size] = token
            self._steps[row] += 1
            self.input_ids.array.view(np.int64)[row] = token
            self.position_ids.array.view(np.int64)[row] += 1
            self.seqlens_k.array.view(np.int32)[row] += 1
            place = self.seqlens_k.array.view(np.int32)[row]
            if self.attention_mask is not None and place < self._slots:
                self.attention_mask.array.view(np.int64)[row * self._slots + place] = 1

    def token(self, row: int, number: int) -> int:
        return int(self._ring[row, number % self._ring_size])

    def close(self) -> None:
        pass


class _Session:
    """A CPU session as the CUDA engine wants one: runs are queued, and `cuda` addresses are the host's."""

    def __init__(self, session: Any, stream: Stream) -> None:
        self._session, self._stream = session, stream
        self.model, self.dtypes = session.model, session.dtypes

    def foreign_nodes(self) -> tuple[str, ...]:
        return ()

    def run(self) -> Any:
        run, stream = self._session.run(), self._stream
        bind = run.address

        class Run(type(run)):  # type: ignore[misc]
            def __call__(self) -> None:
                stream.queue(super().__call__)

            def address(self, kind: str, name: str, shape: Sequence[int], address: int) -> None:
                bind("cpu", name, shape, address)

        run.__class__ = Run
        return run


class SimulatedDecoder(Decoder):
    """A decoder whose steps go through the CUDA engine."""

    def _make_engine(self, cache: KvCache, stats: Stats) -> Engine:
        stream = Stream(cache.signature)
        session: Any = _Session(self._session, stream)
        return CudaEngine(session, cache, self.config.graph, stats, stream)  # type: ignore[arg-type]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimulatedDecoder]:
    """`simulated(directory, **settings)`: a decoder on a simulated CUDA device."""
    for name, stand_in in (("Buffer", Buffer), ("Event", Event), ("DeviceSampler", Sampler)):
        monkeypatch.setattr(cuda_engine, name, stand_in)

    def make(directory: Path, **settings: Any) -> SimulatedDecoder:
        return SimulatedDecoder(directory, **settings)

    return make
