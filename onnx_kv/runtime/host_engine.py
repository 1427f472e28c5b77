"""The engine of the CPU: every step is one bound run, and tokens are chosen on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.runtime.cache import DTYPES, KvCache
from onnx_kv.runtime.config import GraphMode
from onnx_kv.runtime.feeds import feeds
from onnx_kv.runtime.graph import CapturedStep, StepFacts, decline_reason
from onnx_kv.runtime.rows import Chosen, Row
from onnx_kv.runtime.sampling import HostSampler, Sampling
from onnx_kv.runtime.session import Session
from onnx_kv.runtime.stats import Stats


class HostEngine:
    """Prefill of one row and decode steps of all rows of `cache`, on the CPU. An `Engine`."""

    def __init__(self, session: Session, cache: KvCache, mode: GraphMode, stats: Stats) -> None:
        """Make the engine of a cache.

        Raises:
            ConfigError: graphs are demanded.
        """
        self._session = session
        self._ports = session.model.metadata
        self._cache = cache
        self._stats = stats
        self._run = session.run()
        self._bound: object = None  # the cache's signature when `_run` was bound
        self._logits = np.empty((cache.batch, 1, 0), DTYPES[session.dtypes[self._ports.logits_output]])
        declined = decline_reason(StepFacts(mode, on_cuda=False, logits_on_device=False))
        self._step = CapturedStep(self._run_step, None, cache.signature, stats, declined)

    def make_room(self, lengths: Sequence[int]) -> None:
        """See `Engine.make_room`."""
        event = self._cache.ensure(lengths)
        if event is not None:
            self._step.grew(event)

    def prefill(self, row: int, tokens: Sequence[int], past: int) -> None:
        """See `Engine.prefill`."""
        run = self._session.run()
        run.cache(self._cache.bindings(row))
        run.output(self._ports.logits_output)
        for name, values in feeds(self._ports, [tokens], [past]).items():
            run.array(name, values)
        run()
        address, (_, positions, vocabulary) = run.result(self._ports.logits_output)
        if self._logits.shape[-1] != vocabulary:
            self._logits = np.empty((self._cache.batch, 1, vocabulary), self._logits.dtype)
            self._bound = None
        size = vocabulary * self._logits.itemsize
        ctypes.memmove(self._logits[row].ctypes.data, address + (positions - 1) * size, size)

    def decode(self, rows: Sequence[Row], sampling: Sampling, logits: bool) -> Iterator[Chosen]:
        """See `Engine.decode`."""
        sampler = HostSampler(sampling, len(rows))
        while True:
            live = [index for index, row in enumerate(rows) if row.finish is None]
            values: npt.NDArray[Any] = self._logits[:, 0]
            tokens = sampler.choose(values, live)
            yield Chosen(dict(zip(live, tokens, strict=True)), values.copy() if logits else None)
            # The last token of a finished row goes to its own place once more, which changes nothing.
            self.make_room([len(row.tokens) for row in rows])
            last, past = [row.tokens[-1:] for row in rows], [len(row.tokens) - 1 for row in rows]
            for name, array in feeds(self._ports, last, past).items():
                self._run.array(name, array)
            self._step()
            for row in rows:
                row.cached = len(row.tokens)

    def close(self) -> None:
        """See `Engine.close`."""
        self._step.close()

    def _run_step(self) -> None:
        if self._bound != self._cache.signature():
            self._run.cache(self._cache.bindings())
            self._run.output_address(self._ports.logits_output, self._logits.shape, self._logits.ctypes.data)
            self._bound = self._cache.signature()
        self._run()
        self._stats.decode_steps += 1
