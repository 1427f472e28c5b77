"""Every counter of a decoder, with its definition. A counter has one owner, which alone adds to it.

| owner              | counters                                                                       |
|--------------------|--------------------------------------------------------------------------------|
| decoder            | tokens, steps and seconds of prefill and decode                                |
| cache              | growth, sharing, and what its memory holds: bytes, maps, map time              |
| captured step      | captures, replays, keeps, invalidations and their reasons, `decline_reason`    |
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from onnx_kv.runtime.cache import KvCache


@dataclass
class Stats:
    """Counters since the decoder was made; figures of memory are of now."""

    prompt_tokens: int = 0
    """Tokens that went through prefill, over all rows: prompts, appended turns, recomputed tokens after a rewind."""

    prefill_runs: int = 0
    """Session runs of prefill: pieces of at most `prefill_chunk` tokens of one row."""

    prefill_seconds: float = 0.0
    """Host seconds of prefill, until its logits were there (CPU) or its work was queued (CUDA)."""

    generated_tokens: int = 0
    """Tokens handed to the caller, over all rows."""

    decode_steps: int = 0
    """Runs of the model on one new token a row, eager or replayed, warm-up runs included."""

    decode_seconds: float = 0.0
    """Host seconds between the end of prefill and the last token handed to the caller, less the caller's own time."""

    queue_seconds: float = 0.0
    """Host seconds of `decode_seconds` in which steps were queued on a CUDA device: room made, graph launched. The
    device works meanwhile; it waits for the host only where this exceeds its own time."""

    growth_events: int = 0
    """Times the longest row outgrew the bucket `max(min_bucket, next power of two)` that it was in. Every policy counts
    the same boundaries, so that policies can be compared; the bucket that holds the prompt is no growth."""

    kv_bytes_moved: int = 0
    """Live KV bytes whose place changed with a growth: they were re-strided, or reallocated. A mask is never moved."""

    kv_bytes_copied: int = 0
    """Those of `kv_bytes_moved` that had to be copied: a growth in place leaves each reservation's first stripe."""

    captures: int = 0
    """Decode steps recorded as a graph and instantiated."""

    replays: int = 0
    """Launches of a captured graph. The step that is captured is launched too, and counts."""

    invalidations: int = 0
    """Times a binding's (pointer, shape) was not what the next step would have replayed: a capture had to follow.
    The first binding counts as one, so that captures and invalidations agree where every graph came to be used."""

    growth_keeps: int = 0
    """Growth events after which every binding's (pointer, shape) was the same. Counted whether or not there is a graph
    to keep."""

    keep_reasons: Counter[str] = field(default_factory=Counter)
    """Why graphs were kept: reason → times."""

    invalidation_reasons: Counter[str] = field(default_factory=Counter)
    """Why graphs were given up: reason → times."""

    decline_reason: str | None = None
    """Why steps run without a captured graph: the name of the predicate that said no. None where graphs are used."""

    physical_kv_bytes: int = 0
    """Bytes of memory behind the cache now: whole granules where it is mapped, the buffers' sizes where it is not."""

    reserved_kv_bytes: int = 0
    """Bytes of address range reserved for the cache now; equal to `physical_kv_bytes` for plain buffers."""

    borrowed_kv_bytes: int = 0
    """Bytes of granules that rows share with the row or cache that committed them: `physical_kv_bytes` has each once,
    where it was committed."""

    shared_starts: int = 0
    """Rows that started from another's tokens by mapping its granules."""

    copied_starts: int = 0
    """Rows that started from another's tokens by copying all of them."""

    copy_reasons: Counter[str] = field(default_factory=Counter)
    """Why rows that could have shared a prefix copied all of it (see `sharing.py`): reason → times."""

    detached_granules: int = 0
    """Shared granules that a row gave up because it was about to write where they lay."""

    maps: int = 0
    """Granules mapped at an address."""

    unmaps: int = 0
    """Granules unmapped."""

    map_seconds: float = 0.0
    """Host seconds in creating, mapping and unmapping memory."""

    growth_decline_reason: str | None = None
    """Why the cache grows by copying although its policy says otherwise; None where it does not."""

    def absorb(self, cache: KvCache) -> None:
        """Add what a cache has counted; for one that is about to go, since its own counters go with it."""
        self.growth_events += cache.counters.growth_events
        self.kv_bytes_moved += cache.counters.bytes_moved
        self.kv_bytes_copied += cache.counters.bytes_copied
        self.shared_starts += cache.counters.shared_starts
        self.copied_starts += cache.counters.copied_starts
        self.detached_granules += cache.counters.detached_granules
        if cache.backing is not None:
            self.maps += cache.backing.maps
            self.unmaps += cache.backing.unmaps
            self.map_seconds += cache.backing.map_seconds

    def snapshot(self, cache: KvCache | None, prefixes: Iterable[KvCache] = ()) -> Stats:
        """A copy of the counters as they are now, those of the cache there is and of shared prefixes included."""
        now = copy.deepcopy(self)
        for item in [*prefixes, *([] if cache is None else [cache])]:
            now.absorb(item)
            now.physical_kv_bytes += item.physical_bytes
            now.borrowed_kv_bytes += item.borrowed_bytes
            now.reserved_kv_bytes += item.reserved_bytes
            now.growth_decline_reason = item.decline_reason
        return now

    def tokens_per_second(self) -> float:
        """Generated tokens over decode seconds; 0 before the first token."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The counters by name, as JSON has them."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
