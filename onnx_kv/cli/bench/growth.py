"""`onnx-kv bench growth`: what growing a cache costs, by layout, policy and commit-ahead, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from onnx_kv.bench.growth import FIRST, GROWTH, LONGEST, MEAN, GrowthCost, GrowthSettings, bench_growth
from onnx_kv.bench.sweep import HOST_GRANULE
from onnx_kv.cli._console import output
from onnx_kv.cli._geometry import BATCH, geometry_options, model_cache
from onnx_kv.cli._units import byte_count, bytes_text
from onnx_kv.cli.bench._report import device_facts, json_option, write_result

_TOKENS = 2048


@click.command()
@geometry_options
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--batch", type=BATCH, default=1, show_default=True, help="Rows.")
@click.option("--tokens", type=click.IntRange(min=1), help=f"Grow every row to this.  [default: {_TOKENS}]")
@click.option("--min-bucket", type=click.IntRange(min=1), default=256, show_default=True, help="Smallest bucket.")
@click.option("--commit-ahead", type=click.IntRange(min=0), multiple=True, default=(0, 256), show_default=True)
@click.option("--granularity", type=byte_count, help="Bytes of a granule.  [default: the GPU's own; 2MiB on the host]")
@click.option("--budget", type=byte_count, default="2GiB", show_default=True, help="Most bytes that a cache may hold.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@json_option
def growth(
    model: Path | None,
    geometry: str | None,
    max_length: int | None,
    dtype: str | None,
    device: str,
    batch: int,
    tokens: int | None,
    min_bucket: int,
    commit_ahead: tuple[int, ...],
    granularity: int | None,
    budget: int,
    repeats: int,
    json_path: Path | None,
) -> None:
    """Grow the KV cache of MODEL, or of a geometry, token by token; one process a configuration, interleaved."""
    cache = model_cache(model, geometry, max_length, dtype)
    settings = GrowthSettings(
        device=device,
        batch=batch,
        tokens=tokens or min(_TOKENS, cache.max_length),
        min_bucket=min_bucket,
        commit_aheads=commit_ahead,
        granule=granularity or (HOST_GRANULE if device == "cpu" else None),
        budget=budget,
    )
    with Console(stderr=True).status("starting") as status:
        costs = bench_growth(cache, settings, repeats=repeats, progress=status.update)
    facts = device_facts(device)
    _print(costs, f"growth to {settings.tokens:,} tokens on {facts['device']}")
    write_result(json_path, [row for cost in costs for row in cost.times.values()], facts)


def _print(costs: Sequence[GrowthCost], title: str) -> None:
    table = Table("configuration", title=f"{title}; median µs and 10–90 %")
    headers = (FIRST, GROWTH, LONGEST, MEAN, "growths", "moved", "copied", "mapped", "held")
    for header in headers:
        table.add_column(header, justify="right")
    notes: list[str] = []
    for cost in costs:
        times = [cost.times.get(what) for what in (FIRST, GROWTH, LONGEST, MEAN)]
        cells = [f"{row.median:,.4g} ({row.low:,.3g} – {row.high:,.3g})" if row else "" for row in times]
        counts = (bytes_text(cost.bytes_moved), bytes_text(cost.bytes_copied), f"{cost.granules_mapped:,}")
        table.add_row(cost.name, *cells, str(cost.growth_events), *counts, bytes_text(cost.physical_bytes))
        notes += [f"{cost.name}: {note}" for note in cost.times[FIRST].notes]
    console = output()
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
