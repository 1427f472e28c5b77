"""How a session is told where a cache's bytes are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Binding:
    """One (layer, side) buffer of the cache: its address and its shape [batch, kv_heads, capacity, head_dim]."""

    address: int
    shape: tuple[int, int, int, int]
