"""Grows one cache token by token: run as a process that reads a request and prints a result (process.py).

The request has the arguments of `KvCache` (`layers` as pairs of KV heads and head size), `granule` and `budget` in
bytes, and `tokens`, to which every row grows.
"""

from __future__ import annotations

import time
from typing import Any

from onnx_kv.bench.process import answer
from onnx_kv.cuda import Stream, device_ordinal
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout, LayerShape
from onnx_kv.memory import MemoryBudget, MemoryPool
from onnx_kv.runtime.cache import KvCache


def grow(request: dict[str, Any]) -> dict[str, Any]:
    """Time each token's `ensure` until its copies are done, the first and growth events apart. Microseconds."""
    ordinal = device_ordinal(request["device"])
    stream = None if ordinal is None else Stream(ordinal)
    growths: list[float] = []
    others: list[float] = []
    with KvCache(
        [LayerShape(*layer) for layer in request["layers"]],
        KvLayout.parse(request["layout"]),
        request["dtype"],
        request["batch"],
        request["max_length"],
        policy=GrowthPolicy(request["policy"]),
        min_bucket=request["min_bucket"],
        commit_ahead=request["commit_ahead"],
        device=request["device"],
        stream=stream,
        pool=MemoryPool(request["device"], request["granule"]),
        budget=MemoryBudget(request["budget"], setting="--budget"),
    ) as cache:
        for length in range(1, request["tokens"] + 1):
            started = time.perf_counter()
            event = cache.ensure([length] * request["batch"])
            if event is not None and stream is not None:
                stream.synchronize()
            (others if event is None else growths).append((time.perf_counter() - started) * 1e6)
        return {
            "first_us": others[0],
            "growth_us": growths,
            "other_us": others[1:],
            "growth_events": cache.counters.growth_events,
            "bytes_moved": cache.counters.bytes_moved,
            "bytes_copied": cache.counters.bytes_copied,
            "maps": cache.backing.maps if cache.backing is not None else 0,
            "physical_bytes": cache.physical_bytes,
            "decline_reason": cache.decline_reason,
        }


if __name__ == "__main__":
    answer(grow)
