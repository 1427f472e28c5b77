"""What a growth of the cache was, and what a cache has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_kv.runtime.binding import Binding


@dataclass(frozen=True)
class GrowthEvent:
    """The longest row outgrew its bucket.

    `bytes_moved` counts the live bytes of memory that was re-strided or reallocated; `bytes_copied` those of them that
    had to be copied, since a growth in place leaves each reservation's first stripe where it is.
    """

    old_capacity: int
    new_capacity: int
    bytes_moved: int
    bytes_copied: int
    before: tuple[Binding, ...]
    after: tuple[Binding, ...]

    @property
    def kept(self) -> bool:
        """Whether every binding is the same, so that a captured graph stays valid."""
        return self.before == self.after


@dataclass
class CacheCounters:
    """What growth and sharing have done since the cache was made; `stats.py` defines each."""

    growth_events: int = 0
    growth_keeps: int = 0
    bytes_moved: int = 0
    bytes_copied: int = 0
    shared_starts: int = 0
    copied_starts: int = 0
    detached_granules: int = 0
