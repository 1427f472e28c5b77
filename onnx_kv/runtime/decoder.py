"""The decoder: a model directory that generates tokens, one conversation or a batch of them at a time."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from onnx_kv import cuda
from onnx_kv.errors import CapacityError, ConfigError, OnnxKvError
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import Side
from onnx_kv.runtime.cache import KvCache
from onnx_kv.runtime.config import RuntimeConfig
from onnx_kv.runtime.cuda_engine import CudaEngine
from onnx_kv.runtime.host_engine import HostEngine
from onnx_kv.runtime.model import RuntimeModel
from onnx_kv.runtime.prefixes import Prefixes
from onnx_kv.runtime.rows import Engine, FinishReason, Row
from onnx_kv.runtime.sampling import GREEDY, Sampling
from onnx_kv.runtime.session import Session
from onnx_kv.runtime.stats import Stats
from onnx_kv.runtime.tokenizer import Tokenizer

Prompts = Sequence[int] | Sequence[Sequence[int]]
"""Token ids of one row, or of several, which may differ in length."""


@dataclass(frozen=True)
class Step:
    """One token a row: None for a row that had finished before. `logits`, where asked for, is [rows, vocabulary]."""

    tokens: tuple[int | None, ...]
    logits: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class Generation:
    """What a row generated, its stop token included, and why it ended."""

    tokens: list[int]
    finish: FinishReason


class Decoder:
    """Generates tokens with the model of a directory.

    A decoder holds one batch of rows: `append` adds to what has been said, `stream` and `generate` go on from there,
    `rewind` takes back. Use a decoder from one thread at a time; several decoders in several threads are independent.

        decoder = Decoder("models/qwen2-tiny")
        prompt = decoder.tokenizer.encode("The key")
        [answer] = decoder.generate(prompt, max_new_tokens=16)
        print(decoder.tokenizer.decode(answer.tokens))
    """

    def __init__(
        self, model_dir: str | Path, *, stock: bool = False, profile: Path | None = None, **settings: Any
    ) -> None:
        """Load the model.

        Args:
            model_dir: a model directory, patched or not.
            stock: run ONNX Runtime's own attention kernels in place of ours, for comparison; head-major only.
            profile: let ONNX Runtime time every node and write files that begin like this; `end_profile` tells which.
            **settings: `device`, `kv_layout`, `growth`, … as in `onnx_kv.runtime.config`.

        Raises:
            ConfigError: a setting that cannot be used, or does not fit the model.
            ModelDirError, MetadataError: the directory cannot be read or run.
            RuntimeSetupError: there is no ONNX Runtime that serves the device, or no op library.
        """
        self.config = RuntimeConfig.resolve(**settings)
        self.model = RuntimeModel.open(model_dir, self.config.kv_layout)
        self.max_length = _max_length(self.config, self.model)
        self._stock = stock
        self._stats = Stats()
        device = self.config.device
        self._stream = None if device.kind == "cpu" else cuda.Stream(device.index)
        self._session = Session(
            self.model, device, stock=stock, threads=self.config.threads, stream=self._stream, profile=profile
        )
        self._rows: list[Row] = []
        self._closed = False
        self._uses = 0  # how often a stream under way was made void
        self._prefixes = Prefixes()
        self._cache: KvCache | None = None
        self._engine: Engine | None = None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ModelDirError: the directory has no `tokenizer.json`.
        """
        return Tokenizer(self.model.directory.path)

    @property
    def stats(self) -> Stats:
        """The counters as they are now; a copy."""
        return self._stats.snapshot(self._cache, self._prefixes.caches)

    @property
    def tokens(self) -> list[list[int]]:
        """All that has been said in each row, generated tokens included."""
        return [list(row.tokens) for row in self._rows]

    @property
    def finish(self) -> list[FinishReason | None]:
        """Why each row ended; None for one that has not."""
        return [row.finish for row in self._rows]

    def append(self, prompts: Prompts) -> None:
        """Add tokens to every row, or begin with as many rows as there are prompts.

        Nothing is computed before the next generation. To generate from an empty prompt, add the model's first token.

        Raises:
            CapacityError: a row would leave no room for a token; no row was changed.
            ConfigError: another number of prompts than there are rows, a prompt that is empty, or a token that the
                model does not have.
        """
        self._begin_use()
        batch = _as_batch(prompts)
        if self._rows and len(batch) != len(self._rows):
            raise ConfigError(f"{len(batch)} prompts for a batch of {len(self._rows)} rows; reset() begins a new batch")
        rows = self._rows or [Row() for _ in batch]
        for index, (row, prompt) in enumerate(zip(rows, batch, strict=True)):
            if not row.tokens and not prompt:
                raise ConfigError(f"the prompt of row {index} is empty; give at least one token")
            self._check_tokens(f"the prompt of row {index}", prompt)
            if len(row.tokens) + len(prompt) >= self.max_length:
                raise CapacityError(
                    f"row {index} would have {len(row.tokens) + len(prompt)} tokens, and a row has room for "
                    f"{self.max_length} with at least one to generate; shorten the prompt or raise max_length"
                )
        self._rows = rows
        for row, prompt in zip(rows, batch, strict=True):
            row.tokens += prompt

    def share_prefix(self, tokens: Sequence[int]) -> None:
        """Compute the first tokens that many prompts have in common, once.

        A stream under way is over. Every row that begins with these tokens from now on starts from there: it computes
        what follows alone, and shares their memory where granules can be mapped (`sharing.py`; `stats.copy_reasons`
        says why not). The longest known prefix counts. They are kept until `drop_prefixes` or `close`.

        Raises:
            ConfigError: there are no tokens, or one that the model does not have.
            CapacityError: a row would have no room for a token behind them.
            OutOfMemoryError: there is no memory for them; nothing changed.
        """
        if not tokens:
            raise ConfigError("a shared prefix needs at least one token")
        self._check_tokens("the shared prefix", tokens)
        if len(tokens) >= self.max_length:
            raise CapacityError(
                f"the shared prefix has {len(tokens)} tokens, and a row has room for {self.max_length} with at least "
                "one to generate; shorten it or raise max_length"
            )
        self._begin_use()
        if self._prefixes.knows(tokens):
            return
        row = Row(list(tokens))
        cache = self._make_cache(1, commit_ahead=0)
        try:
            engine = self._make_engine(cache, Stats())
            try:
                self._prefill(engine, cache, [row])
            finally:
                engine.close()
        except BaseException:
            cache.close()
            raise
        self._prefixes.add(row.tokens, cache)

    def drop_prefixes(self) -> None:
        """Forget the shared prefixes. What rows share of them stays in memory until those are gone."""
        for cache in self._prefixes.clear():
            self._stats.absorb(cache)
            cache.close()

    def rewind(self, length: int) -> None:
        """Take back all tokens of every row beyond the first `length`; the next generation goes on from there.

        Raises:
            ConfigError: a row is shorter, or nothing would be left.
        """
        self._begin_use()
        shortest = min((len(row.tokens) for row in self._rows), default=0)
        if not 1 <= length <= shortest:
            raise ConfigError(f"rewind({length}): must be at least 1 and at most {shortest}, the shortest row's length")
        for row in self._rows:
            del row.tokens[length:]
            row.cached = min(row.cached, length)

    def reset(self) -> None:
        """Forget every row. The next `append` begins a new batch; the cache's memory stays for it."""
        self._begin_use()
        self._rows = []

    def trim(self) -> int:
        """Give back the memory that what has been said does not need; return how many bytes of the cache that were.

        A stream under way is over. The model stays loaded and every row as it is; the device gets the memory back.
        Buckets shrink, so that a captured graph may have to be captured anew; at a fixed stride it stays.
        """
        self._begin_use()
        return self._trim()

    def read_cache(self, row: int = 0) -> list[npt.NDArray[Any]]:
        """Copy a row's keys and values to the host: key, then value, of each layer, `[kv_heads, tokens, head_dim]`.

        They are of the tokens that have been computed, which the one generated last need not be.
        """
        if self._cache is None:
            return []
        cached = self._rows[row].cached
        return [
            self._cache.read_row(layer, side, row)[:, :cached]
            for layer in range(len(self.model.layers))
            for side in Side
        ]

    def generate(self, prompts: Prompts | None = None, **options: Any) -> list[Generation]:
        """Generate until every row has ended; one result a row. Arguments and errors are those of `stream`."""
        generated: list[list[int]] = []
        for step in self.stream(prompts, **options):
            generated = generated or [[] for _ in step.tokens]
            for row, token in zip(generated, step.tokens, strict=True):
                if token is not None:
                    row.append(token)
        return [
            Generation(tokens, row.finish)
            for tokens, row in zip(generated, self._rows, strict=True)
            if row.finish is not None  # each has ended, or the stream would go on
        ]

    def stream(
        self,
        prompts: Prompts | None = None,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        stop_tokens: Sequence[int] | None = None,
        logits: bool = False,
    ) -> Iterator[Step]:
        """Generate a token for every row, step after step, until every row has ended or the caller stops asking.

        Anything else that is done with the decoder ends a stream; `append` or `stream` go on from where it was.

        Args:
            prompts: begin anew with these; None goes on with what has been said.
            max_new_tokens: at most so many for each row; None: as many as fit.
            sampling: how tokens are chosen.
            stop_tokens: tokens that end a row; None: the model's own. An empty list ends no row early.
            logits: hand out the logits of each step too, which makes the host wait for each step.

        Raises:
            CapacityError: a prompt, or what has been said, leaves no room for a token.
            ConfigError: there is nothing to go on with, or an option that cannot be used.
            ModelOutputError: the model computed logits that are not finite (while generating).
            OutOfMemoryError: the cache cannot grow (while generating). The rows are as the last step left them.
        """
        self._begin_use()
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens}: must be at least 1")
        if prompts is not None:
            rows, self._rows = self._rows, []
            try:
                self.append(prompts)
            except Exception:
                self._rows = rows
                raise
        if not self._rows:
            raise ConfigError("there is nothing to go on with; give a prompt")
        self._set_limits(max_new_tokens)
        stops = self.model.stop_tokens if stop_tokens is None else frozenset(stop_tokens)
        return self._generate(self._uses, sampling, stops, logits)

    def end_profile(self) -> Path:
        """End the profile that was asked for, and return ONNX Runtime's file: a JSON list of trace events."""
        return self._session.end_profile()

    def close(self) -> None:
        """Unload the model and give back all memory. The counters stay; nothing else works any more."""
        if self._closed:
            return
        self._begin_use()
        self._rows = []
        self._drop_cache()
        self.drop_prefixes()
        self._session.close()
        if self._stream is not None:
            self._stream.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin_use(self) -> None:
        """Make a stream under way void: what it goes on from is about to change."""
        if self._closed:
            raise ConfigError("this decoder is closed")
        self._uses += 1

    def _check_use(self, use: int) -> None:
        if self._uses != use:
            raise ConfigError("this stream is over: its decoder has been used otherwise since")

    def _check_tokens(self, what: str, prompt: Sequence[int]) -> None:
        most = self.model.vocabulary
        unknown = next((token for token in prompt if token < 0 or (most is not None and token >= most)), None)
        if unknown is not None:
            last = "" if most is None else f" to {most - 1}"
            raise ConfigError(f"{what} has the token {unknown}; the model has tokens from 0{last}")

    def _set_limits(self, max_new_tokens: int | None) -> None:
        for index, row in enumerate(self._rows):
            if len(row.tokens) >= self.max_length:
                raise CapacityError(
                    f"row {index} has {len(row.tokens)} tokens, and a row has room for {self.max_length}"
                )
            row.finish = None
            row.limit = self.max_length
            if max_new_tokens is not None:
                row.limit = min(row.limit, len(row.tokens) + max_new_tokens)

    def _generate(self, use: int, sampling: Sampling, stops: frozenset[int], logits: bool) -> Iterator[Step]:
        self._check_use(use)
        rows, engine = self._rows, self._prefilled()
        started = time.perf_counter()
        for chosen in engine.decode(rows, sampling, logits):
            for index, token in chosen.tokens.items():
                self._accept(rows[index], token, stops)
            self._stats.generated_tokens += len(chosen.tokens)
            self._stats.decode_seconds += time.perf_counter() - started
            ended = all(row.finish for row in rows)
            if ended and self.config.trim_after_turn:
                self._trim()
            yield Step(tuple(chosen.tokens.get(index) for index in range(len(rows))), chosen.logits)
            if ended:
                return
            self._check_use(use)
            started = time.perf_counter()

    def _accept(self, row: Row, token: int, stops: frozenset[int]) -> None:
        row.tokens.append(token)
        if token in stops:
            row.finish = FinishReason.STOP
        elif len(row.tokens) >= row.limit:
            at_maximum = row.limit == self.max_length
            row.finish = FinishReason.MAX_LENGTH if at_maximum else FinishReason.MAX_NEW_TOKENS

    def _prefilled(self) -> Engine:
        """Bring every row into the cache, but for what was there; the engine then has the logits of each row's end."""
        engine, cache = self._fitting_engine()
        self._prefill(engine, cache, self._rows)
        return engine

    def _prefill(self, engine: Engine, cache: KvCache, rows: Sequence[Row]) -> None:
        started = time.perf_counter()
        for row in rows:
            # The logits of the last token are wanted, so it is computed again where the cache has it.
            row.cached = min(row.cached, len(row.tokens) - 1)
        cache.rewind([row.cached for row in rows])  # the rows, not the cache, know what has been taken back
        self._stats.copy_reasons.update(self._prefixes.start(cache, rows))
        engine.make_room([len(row.tokens) for row in rows])
        for index, row in enumerate(rows):
            self._stats.prompt_tokens += len(row.tokens) - row.cached
            while row.cached < len(row.tokens):
                piece = row.tokens[row.cached : row.cached + self.config.prefill_chunk]
                engine.prefill(index, piece, row.cached)
                row.cached += len(piece)
                self._stats.prefill_runs += 1
        self._stats.prefill_seconds += time.perf_counter() - started

    def _fitting_engine(self) -> tuple[Engine, KvCache]:
        """The engine and cache for as many rows as there are now."""
        if self._cache is not None and self._cache.batch != len(self._rows):
            self._drop_cache()
        if self._cache is None or self._engine is None:
            cache = self._make_cache(len(self._rows))
            try:
                self._engine = self._make_engine(cache, self._stats)
            except OnnxKvError:
                cache.close()
                raise
            self._cache = cache
        return self._engine, self._cache

    def _make_cache(self, batch: int, commit_ahead: int | None = None) -> KvCache:
        config, layers = self.config, self.model.layers
        most, policy, bucket = self.max_length, config.growth, config.min_bucket
        if self._stock:
            # Its kernels promise nothing about memory beyond the live prefix, and want room for a layer's window.
            most = max(most, *(layer.window or 0 for layer in layers))
            policy, bucket = GrowthPolicy.REALLOC, most
        return KvCache(
            [layer.shape for layer in layers],
            self.model.layout,
            layers[0].dtype,
            batch,
            most,
            policy=policy,
            min_bucket=bucket,
            commit_ahead=config.commit_ahead if commit_ahead is None else commit_ahead,
            device=str(config.device),
            stream=self._stream,
            budget=config.budget,
        )

    def _trim(self) -> int:
        if self._cache is None:
            return 0
        if self._cache.batch != len(self._rows):  # nothing of the rows is in it, and the next batch needs another one
            before = self._cache.physical_bytes
            self._drop_cache()
            return before
        self._cache.rewind([row.cached for row in self._rows])
        return self._cache.trim()

    def _make_engine(self, cache: KvCache, stats: Stats) -> Engine:
        if self._stream is None:
            return HostEngine(self._session, cache, self.config.graph, stats)
        return CudaEngine(self._session, cache, self.config.graph, stats, self._stream)

    def _drop_cache(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._cache is not None:
            self._stats.absorb(self._cache)
            self._cache.close()
        self._cache = self._engine = None


def _max_length(config: RuntimeConfig, model: RuntimeModel) -> int:
    most = model.metadata.max_sequence_length
    if config.max_length > most:
        raise ConfigError(f"max_length={config.max_length}, but the model's sequences have at most {most} tokens")
    return config.max_length or most


def _as_batch(prompts: Prompts) -> list[list[int]]:
    if not prompts:
        raise ConfigError("no prompt was given")
    if isinstance(prompts[0], int):
        return [list(prompts)]  # type: ignore[arg-type]
    return [list(prompt) for prompt in prompts]  # type: ignore[arg-type]
