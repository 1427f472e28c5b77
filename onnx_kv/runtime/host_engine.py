"""The engine of the CPU: every step is one bound run, and tokens are chosen on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.runtime.cache import KvCache
from onnx_kv.runtime.feeds import feed
from onnx_kv.runtime.rows import Chosen, Row
from onnx_kv.runtime.sampling import HostSampler, Sampling
from onnx_kv.runtime.session import Session
from onnx_kv.runtime.stats import Stats


class HostEngine:
    """Prefill of one row and decode steps of all rows of `cache`, on the CPU. An `Engine`."""

    def __init__(self, session: Session, cache: KvCache, stats: Stats) -> None:
        self._session = session
        self._ports = session.model.metadata
        self._cache = cache
        self._stats = stats
        stats.decline_reason = "the CPU has no graphs to capture"
        self._step = session.run()
        self._bound: object = None  # the cache's signature when `_step` was bound
        self._logits = np.empty((cache.batch, 1, 0), session.dtypes[self._ports.logits_output])

    def prefill(self, row: int, tokens: Sequence[int], past: int) -> None:
        """See `Engine.prefill`."""
        run = self._session.run()
        run.cache(self._cache.bindings(row))
        run.output(self._ports.logits_output)
        feed(run, self._ports, [tokens], [past])
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
            self._run_step(rows)

    def _run_step(self, rows: Sequence[Row]) -> None:
        """Run the last token of every row; a finished row's goes to its own place, however often."""
        self._cache.ensure([len(row.tokens) for row in rows])
        if self._bound != self._cache.signature():
            self._step.cache(self._cache.bindings())
            self._step.output_address(self._ports.logits_output, self._logits.shape, self._logits.ctypes.data)
            self._bound = self._cache.signature()
        feed(self._step, self._ports, [row.tokens[-1:] for row in rows], [len(row.tokens) - 1 for row in rows])
        self._step()
        self._stats.decode_steps += 1
        for row in rows:
            row.cached = len(row.tokens)
