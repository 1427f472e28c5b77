"""The engine of CUDA devices: steps are queued ahead of the host, and replayed as one captured graph.

Everything of a decoder runs on one stream, in order. A step is one bound run of the model and one kernel that chooses
the next tokens and advances the inputs (`device_sampler.py`); nothing in it needs the host. So the next step is queued
before the tokens of the last one are read, and the host waits only for a step that is already over. A row that turns
out to have ended has then gone one step too far: its place in the cache is put back, and what it wrote is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.cuda import Buffer, CopyKind, Event, Stream
from onnx_kv.errors import ModelOutputError, OnnxKvError
from onnx_kv.runtime.cache import DTYPES, KvCache
from onnx_kv.runtime.config import GraphMode
from onnx_kv.runtime.device_sampler import NO_TOKEN, DeviceSampler
from onnx_kv.runtime.feeds import feeds
from onnx_kv.runtime.graph import CapturedStep, StepFacts, decline_reason
from onnx_kv.runtime.rows import Chosen, Row
from onnx_kv.runtime.sampling import GREEDY, Sampling
from onnx_kv.runtime.session import Session
from onnx_kv.runtime.stats import Stats


class CudaEngine:
    """Prefill of one row and decode steps of all rows of `cache`, on the session's CUDA device. An `Engine`."""

    def __init__(self, session: Session, cache: KvCache, mode: GraphMode, stats: Stats, stream: Stream) -> None:
        """Make the engine of a cache.

        Raises:
            ConfigError: graphs are demanded, and the model's steps cannot be captured.
        """
        self._session = session
        self._ports = session.model.metadata
        self._cache = cache
        self._stats = stats
        self._stream = stream
        self._uploads: dict[str, Buffer] = {}
        self._dtype = session.dtypes[self._ports.logits_output]
        self._vocabulary = 0
        self._logits: Buffer | None = None
        self._sampler: DeviceSampler | None = None
        self._sampling = GREEDY
        self._run = session.run()
        self._bound: object = None  # the cache's signature when `_run` was bound
        self._done = (Event(stream.device), Event(stream.device))  # of steps with an even and an odd number
        self._queued = 0  # choices queued since generation began
        facts = StepFacts(mode, on_cuda=True, foreign_nodes=session.foreign_nodes())
        self._step = CapturedStep(self._run_step, stream, self._signature, stats, decline_reason(facts))

    def make_room(self, lengths: Sequence[int]) -> None:
        """See `Engine.make_room`."""
        event = self._cache.ensure(lengths)
        if event is not None:
            self._step.grew(event)

    def prefill(self, row: int, tokens: Sequence[int], past: int) -> None:
        """See `Engine.prefill`. Returns when the work is queued."""
        run = self._session.run()
        run.cache(self._cache.bindings(row))
        run.output(self._ports.logits_output)
        for name, values in feeds(self._ports, [tokens], [past]).items():
            if name == self._ports.total_sequence_length_input:
                run.array(name, values)  # the operator reads it on the host
            else:
                run.address("cuda", name, values.shape, self._upload(name, values))
        run()
        address, (_, positions, vocabulary) = run.result(self._ports.logits_output)
        logits = self._logits_of(vocabulary)
        size = vocabulary * np.dtype(DTYPES[self._dtype]).itemsize
        source = address + (positions - 1) * size
        self._stream.copy(logits.address + row * size, source, size, CopyKind.DEVICE_TO_DEVICE)

    def decode(self, rows: Sequence[Row], sampling: Sampling, logits: bool) -> Iterator[Chosen]:
        """See `Engine.decode`."""
        sampler = self._start(rows, sampling)
        read = [0] * len(rows)  # tokens taken from each row's ring
        while True:
            refused = None
            ahead = not logits and any(row.finish is None and len(row.tokens) + 1 < row.limit for row in rows)
            if ahead:
                refused = self._try_step(rows)
            tokens = self._read(rows, sampler, read, ahead and refused is None)
            yield Chosen(tokens, self._read_logits() if logits else None)
            for index in tokens:
                if rows[index].finish is not None:
                    sampler.hold(index, rows[index].tokens[-1], len(rows[index].tokens) - 1)
            if refused is not None:
                raise refused
            if not ahead:
                self._queue_step(rows, 0)

    def close(self) -> None:
        """See `Engine.close`."""
        self._stream.synchronize()
        self._step.close()
        for owned in (self._sampler, self._logits, *self._uploads.values()):
            if owned is not None:
                owned.close()

    def _start(self, rows: Sequence[Row], sampling: Sampling) -> DeviceSampler:
        """Choose the first tokens from the logits of prefill."""
        if self._sampler is None:
            slots = self._cache.max_length if self._ports.attention_mask_input else 0
            self._sampler = DeviceSampler(
                sampling, len(rows), self._vocabulary, self._dtype, self._stream, mask_slots=slots
            )
        self._sampling = sampling
        self._sampler.set_sampling(sampling)
        before = [len(row.tokens) - 1 for row in rows]
        self._sampler.start([row.tokens[-1] for row in rows], before, self._cache.capacity)
        self._queued = 0
        self._choose()
        self._mark()
        return self._sampler

    def _try_step(self, rows: Sequence[Row]) -> OnnxKvError | None:
        """Queue the next step; return why it could not be, for after the tokens that are on their way."""
        try:
            self._queue_step(rows, 1)
        except OnnxKvError as error:
            return error
        return None

    def _queue_step(self, rows: Sequence[Row], pending: int) -> None:
        """Queue a step; the host has yet to read `pending` tokens of each row that goes on."""
        started = time.perf_counter()
        lengths = [len(row.tokens) + (pending if row.finish is None else 0) for row in rows]
        capacity = self._cache.capacity
        self.make_room(lengths)
        if self._cache.capacity != capacity and self._sampler is not None:
            self._sampler.set_mask(self._cache.capacity, [length - 1 for length in lengths])
        self._step()
        self._mark()
        self._stats.decode_steps += 1
        for row, length in zip(rows, lengths, strict=True):
            row.cached = length
        self._stats.queue_seconds += time.perf_counter() - started

    def _run_step(self) -> None:
        """Queue one step's work with the present bindings: what a graph captures."""
        signature = self._signature()
        if self._bound != signature:
            self._bind()
            self._bound = signature
        self._run()
        self._choose()

    def _bind(self) -> None:
        sampler, logits, rows = self._sampler, self._logits, self._cache.batch
        assert sampler is not None, "a step follows a choice"
        assert logits is not None, "a choice follows prefill"
        ports, run, capacity = self._ports, self._run, self._cache.capacity
        run.cache(self._cache.bindings())
        run.output_address(ports.logits_output, (rows, 1, self._vocabulary), logits.address)
        run.address("cuda", ports.token_input, (rows, 1), sampler.input_ids.address)
        if ports.position_ids_input is not None:
            run.address("cuda", ports.position_ids_input, (rows, 1), sampler.position_ids.address)
        if ports.attention_mask_input is not None and sampler.attention_mask is not None:
            run.address("cuda", ports.attention_mask_input, (rows, capacity), sampler.attention_mask.address)
        if ports.seqlens_k_input is not None:
            run.address("cuda", ports.seqlens_k_input, (rows,), sampler.seqlens_k.address)
        if ports.total_sequence_length_input is not None:
            run.array(ports.total_sequence_length_input, np.array([capacity]))  # a bound; lengths are on the device

    def _signature(self) -> object:
        """What a graph has baked in: addresses, shapes, and how tokens are chosen."""
        return self._cache.signature(), self._sampling

    def _choose(self) -> None:
        if self._sampler is not None and self._logits is not None:
            self._sampler.choose(self._logits.address, self._vocabulary)

    def _mark(self) -> None:
        """Note the end of the choice queued last."""
        self._done[self._queued % 2].record(self._stream)
        self._queued += 1

    def _read(self, rows: Sequence[Row], sampler: DeviceSampler, read: list[int], ahead: bool) -> dict[int, int]:
        """Wait for the tokens chosen before a step that is queued `ahead`, or last, and take them.

        Raises:
            ModelOutputError: a row's logits had nothing to choose from.
        """
        self._done[(self._queued - (2 if ahead else 1)) % 2].synchronize()
        tokens = {}
        for index, row in enumerate(rows):
            if row.finish is None:
                tokens[index] = sampler.token(index, read[index])
                read[index] += 1
                if tokens[index] == NO_TOKEN:
                    raise ModelOutputError(
                        f"the model's logits of row {index} after {len(row.tokens)} tokens are not finite; the weights "
                        "or a kernel are at fault, or float16 overflowed"
                    )
        return tokens

    def _read_logits(self) -> npt.NDArray[Any]:
        logits = np.empty((self._cache.batch, self._vocabulary), DTYPES[self._dtype])
        if self._logits is not None:
            self._logits.read(logits, self._stream)
        self._stream.synchronize()
        return logits

    def _logits_of(self, vocabulary: int) -> Buffer:
        """The buffer of every row's last logits, [rows, 1, vocabulary]."""
        if self._logits is None:
            self._vocabulary = vocabulary
            size = self._cache.batch * vocabulary * np.dtype(DTYPES[self._dtype]).itemsize
            self._logits = Buffer(size, self._stream.device)
        return self._logits

    def _upload(self, name: str, values: npt.NDArray[Any]) -> int:
        """Queue a copy of an input to the device; return its address, good until the next of this name."""
        array = np.ascontiguousarray(values, self._session.dtypes[name])
        buffer = self._uploads.get(name)
        if buffer is None or buffer.nbytes < array.nbytes:
            self._stream.synchronize()  # the old one may be in use
            buffer = self._uploads[name] = Buffer(array.nbytes, self._stream.device)
        buffer.write(array, self._stream)
        return buffer.address
