"""The prefixes that a decoder has computed for its rows to start from, each in a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onnx_kv.runtime.cache import KvCache
from onnx_kv.runtime.rows import Row


class _Prefix(NamedTuple):
    tokens: Sequence[int]
    cache: KvCache


class Prefixes:
    """Known prefixes, none twice. Their caches are only read."""

    def __init__(self) -> None:
        self._known: list[_Prefix] = []

    @property
    def caches(self) -> list[KvCache]:
        """The cache of each prefix: one row with its tokens."""
        return [prefix.cache for prefix in self._known]

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens are a known prefix."""
        return any(prefix.tokens == list(tokens) for prefix in self._known)

    def add(self, tokens: Sequence[int], cache: KvCache) -> None:
        """Keep `cache`, whose one row holds `tokens`."""
        self._known.append(_Prefix(list(tokens), cache))
        self._known.sort(key=lambda prefix: len(prefix.tokens), reverse=True)

    def clear(self) -> list[KvCache]:
        """Forget all prefixes; return their caches, for the caller to close."""
        caches = self.caches
        self._known = []
        return caches

    def start(self, cache: KvCache, rows: Sequence[Row]) -> list[str]:
        """Let each row of `cache` that is empty start from the longest prefix of its tokens, and set its `cached`.

        A row's last token is left to be computed, for its logits. Returns why prefixes were copied, where they were.

        Raises:
            OutOfMemoryError, DriverError: there is no memory for a row; those before it have started.
        """
        reasons = []
        for index, row in enumerate(rows):
            found = None if row.cached else self._longest(row.tokens)
            if found is None:
                continue
            tokens = min(len(found.tokens), len(row.tokens) - 1)
            if tokens:
                reason = cache.start(index, found.cache, tokens).decline_reason
                row.cached = tokens
                reasons += [reason] if reason is not None else []
        return reasons

    def _longest(self, tokens: Sequence[int]) -> _Prefix | None:
        return next((prefix for prefix in self._known if list(tokens[: len(prefix.tokens)]) == prefix.tokens), None)
