#!/usr/bin/env python3
"""Measure a device's virtual memory: granule, cost of each operation, reserve limit, remapping under a captured graph.

Every cost is the median over repeats, in microseconds of host time a granule. `--device cpu` measures the host backend.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from onnx_kv import cuda
from onnx_kv.errors import OnnxKvError
from onnx_kv.memory import MemoryPool


def microseconds(work: Callable[[], object]) -> float:
    """Host time of one call."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def operation_costs(pool: MemoryPool, granules: int, repeats: int) -> dict[str, float]:
    """Cost of each operation a granule, over runs of `granules` neighbours and over separate ones."""
    near = pool.reserve(granules * pool.granule)
    apart = pool.reserve(2 * granules * pool.granule)
    scattered = [apart.span(2 * i * pool.granule, (2 * i + 1) * pool.granule) for i in range(granules)]
    samples: dict[str, list[float]] = {}

    def sample(name: str, work: Callable[[], object]) -> None:
        samples.setdefault(name, []).append(microseconds(work) / granules)

    for _ in range(repeats):
        sample("create, map, set access: one range", lambda: pool.commit([near.span()]))
        sample("unmap: one range", lambda: pool.decommit([near.span()]))
        sample("map, set access: one range", lambda: pool.commit([near.span()]))
        sample("map again elsewhere: one range", lambda: pool.share([near.span()], [apart.span(0, near.nbytes)]))
        pool.decommit([apart.span(), near.span()])
        sample("map, set access: separate ranges", lambda: pool.commit(scattered))
        sample("commit of what is committed", lambda: pool.commit(scattered))
        pool.decommit([apart.span()])
        sample("release to the driver", pool.trim)
    near.close()
    apart.close()
    return {name: statistics.median(values) for name, values in samples.items()}


def reserve_limit(pool: MemoryPool) -> tuple[int, float]:
    """Largest power of two of address space in one reservation, and the microseconds that reserving 64 GiB takes."""
    size = 1 << 30
    while True:
        try:
            pool.reserve(size).close()
        except OnnxKvError:
            return size // 2, microseconds(lambda: pool.reserve(1 << 36))
        size *= 2


def cost_while_busy(pool: MemoryPool, granules: int, repeats: int) -> float:
    """Cost a granule of a commit while a stream keeps the device writing."""
    reservation = pool.reserve(granules * pool.granule)
    samples = []
    with cuda.Stream() as stream, cuda.Buffer(1 << 30) as buffer:
        for _ in range(repeats):
            for _ in range(100):
                stream.fill(buffer.address, 0, buffer.nbytes)
            samples.append(microseconds(lambda: pool.commit([reservation.span()])) / granules)
            if stream.done:
                raise OnnxKvError("the device finished its work before the commit did; use fewer granules")
            stream.synchronize()
            pool.decommit([reservation.span()])
            pool.trim()
    reservation.close()
    return statistics.median(samples)


def remaps_under_a_graph(pool: MemoryPool) -> bool:
    """Whether a captured graph reads new memory that took the place of old at an address it has baked in."""
    granule = pool.granule
    with cuda.Stream() as stream, cuda.Buffer(64) as target:
        reservation, keep_old = pool.reserve(granule), pool.reserve(granule)
        pool.commit([reservation.span()])
        stream.fill(reservation.address, 1, granule)
        with stream.capture() as capture:
            stream.copy(target.address, reservation.address, 64, cuda.CopyKind.DEVICE_TO_DEVICE)
        seen = []
        for value in (1, 2):
            capture.graph.launch(stream)
            seen.append(int(cuda.copy_to_host(target, np.uint8, (64,), stream)[0]))
            if value == 1:
                pool.share([reservation.span()], [keep_old.span()])  # so that another granule takes its place
                pool.decommit([reservation.span()])
                pool.commit([reservation.span()])
                stream.fill(reservation.address, 2, granule)
        stream.synchronize()
        capture.graph.close()
        reservation.close()
        keep_old.close()
    return seen == [1, 2]


@click.command(help=__doc__)
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:N or cpu.")
@click.option("--granules", default=64, show_default=True, help="Granules of a run.")
@click.option("--repeats", default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(device: str, granules: int, repeats: int, as_json: bool) -> None:
    """Run the probe."""
    try:
        pool = MemoryPool(device)
        limit, reserve_us = reserve_limit(pool)
        ordinal = cuda.device_ordinal(device)
        result: dict[str, Any] = {
            "device": device if ordinal is None else cuda.device_info(ordinal).name,
            "granule_bytes": pool.granule,
            "reserve_limit_bytes": limit,
            "reserve_64_gib_us": reserve_us,
            "us_a_granule": operation_costs(pool, granules, repeats),
            "graph_follows_a_remap": None if ordinal is None else remaps_under_a_graph(pool),
        }
        if ordinal is not None:
            busy = cost_while_busy(pool, min(granules, 48), repeats)
            result["us_a_granule"]["create, map, set access: device busy"] = busy
    except OnnxKvError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    table = Table("operation", "µs a granule")
    for name, cost in result["us_a_granule"].items():
        table.add_row(name, f"{cost:.2f}")
    console = Console()
    console.print(f"{result['device']}: granule {pool.granule:,} bytes")
    console.print(f"largest reservation {limit / (1 << 40):g} TiB; reserving 64 GiB takes {reserve_us:.0f} µs")
    console.print(table)
    if ordinal is not None:
        follows = "reads" if result["graph_follows_a_remap"] else "does NOT read"
        console.print(f"a captured graph {follows} memory mapped anew at an address it knows")


if __name__ == "__main__":
    main()
