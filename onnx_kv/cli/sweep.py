"""`onnx-kv sweep`: what a geometry's caches really commit and move, beside what the plan says; no weights needed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from onnx_kv.bench.result import environment
from onnx_kv.bench.sweep import Point, Step, Sweep, run_sweep
from onnx_kv.cli._console import output
from onnx_kv.cli._geometry import BATCH, geometry_options, model_cache
from onnx_kv.cli._paths import OutputFile
from onnx_kv.cli._units import byte_count, bytes_text, token_counts
from onnx_kv.planning.plot import Mark, plot_committed
from onnx_kv.planning.source import ModelCache
from onnx_kv.planning.window_map import plot_window_map

_SHORT = 8
_CAPACITIES = (1024, 2048, 4096, 8192)
_CONTEXTS = (_SHORT, 512, 2048)


@click.command()
@geometry_options
@click.option("--contexts", type=token_counts, help="Tokens a row, the first a short prefix.  [default: 8,512,2k]")
@click.option("--capacities", type=token_counts, help="Smallest buckets to pin.  [default: 1k,2k,4k,8k]")
@click.option(
    "--boundary", type=click.IntRange(min=1), default=512, show_default=True, help="Bucket to outgrow, tokens."
)
@click.option("--batch", type=BATCH, default=1, show_default=True, help="Rows.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--granularity", type=byte_count, help="Bytes of a granule.  [default: the GPU's own; 2MiB on the host]")
@click.option("--budget", type=byte_count, default="2GiB", show_default=True, help="Most bytes that a cache may hold.")
@click.option("--json", "as_json", is_flag=True, help="Print the sweep as JSON.")
@click.option("--plot", type=OutputFile(), help="Draw committed bytes over context into this file.")
@click.option("--window-map", type=OutputFile(), help="Draw the live windows of --boundary tokens.")
@click.pass_context
def command(
    ctx: click.Context,
    model: Path | None,
    geometry: str | None,
    max_length: int | None,
    dtype: str | None,
    contexts: tuple[int, ...] | None,
    capacities: tuple[int, ...] | None,
    boundary: int,
    batch: int,
    device: str,
    granularity: int | None,
    budget: int,
    as_json: bool,
    plot: Path | None,
    window_map: Path | None,
) -> None:
    """Measure the KV cache of MODEL, or of a geometry, in every layout, and compare it with the plan.

    The caches are real (reserved, committed and grown on the device or on the host), but hold no model. One exists at a
    time. The exit code is 1 where a measured figure is not the planned one.
    """
    cache = model_cache(model, geometry, max_length, dtype)
    console = Console(stderr=True)
    with console.status("starting") as status:
        sweep = run_sweep(
            cache,
            device=device,
            granule=granularity,
            batch=batch,
            contexts=contexts or _fitting(_CONTEXTS, cache),
            capacities=capacities or _fitting(_CAPACITIES, cache),
            boundary=boundary,
            budget=budget,
            progress=status.update,
        )
    knobs = {"batch": sweep.knobs.batch, "granule": sweep.knobs.granule}
    if plot is not None:
        marks = [Mark(point.layout, point.policy, point.length, point.measured) for point in sweep.free]
        plot_committed(cache, plot, min_bucket=1, measured=marks, **knobs)
    if window_map is not None:
        plot_window_map(cache, window_map, length=boundary, **knobs)
    if as_json:
        click.echo(json.dumps(_as_json(sweep), indent=2))
    else:
        _print(sweep)
    ctx.exit(0 if sweep.agrees else 1)


def _fitting(lengths: tuple[int, ...], cache: ModelCache) -> tuple[int, ...]:
    return tuple(length for length in lengths if length <= cache.max_length) or (cache.max_length,)


def _as_json(sweep: Sweep) -> dict[str, Any]:
    model = sweep.model
    return {
        "model": {
            "source": model.source,
            "layers": [[shape.kv_heads, shape.head_dim] for shape in model.layers],
            "dtype": model.dtype,
            "max_length": model.max_length,
        },
        "knobs": dataclasses.asdict(sweep.knobs),
        "environment": environment(),
        "agrees": sweep.agrees,
        "pinned": [_row_json(point) for point in sweep.pinned],
        "free": [_row_json(point) for point in sweep.free],
        "steps": [_row_json(step) for step in sweep.steps],
        "findings": [statement.text for statement in sweep.statements() if not statement.withheld],
        "withheld": [dataclasses.asdict(statement) for statement in sweep.statements() if statement.withheld],
    }


def _row_json(row: Point | Step) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"layout": row.layout.cli_name, "policy": row.policy.value}


def _print(sweep: Sweep) -> None:
    console, model, knobs = output(), sweep.model, sweep.knobs
    console.print(
        f"{model.source}: {len(model.layers)} attention layers, {model.dtype}, at most {model.max_length:,} tokens\n"
        f"Set: device {knobs.device}, granule {bytes_text(knobs.granule)}, batch {knobs.batch}, prefix "
        f"{knobs.contexts[0]:,} tokens, budget {bytes_text(knobs.budget)} a cache; smallest bucket pinned in (a), 1 in "
        "(b) and (c); nothing committed ahead\n",
        highlight=False,
    )
    console.print(_pinned_table(sweep))
    console.print(_free_table(sweep))
    console.print(_steps_table(sweep))
    for statement in sweep.statements():
        kind = "[yellow]no finding[/]" if statement.withheld else "[green]finding[/]"
        reason = f" ({statement.withheld})" if statement.withheld else ""
        console.print(f"{kind}: {statement.text}{reason}", highlight=False)
    verdict = "every figure is as planned" if sweep.agrees else "[red]measured figures differ from the plan[/]"
    console.print(f"Measured against planned: {verdict}.", highlight=False)


def _pinned_table(sweep: Sweep) -> Table:
    layouts = list(dict.fromkeys(point.layout for point in sweep.pinned))
    table = Table(
        "smallest bucket",
        *(f"{layout.cli_name}, bucket" for layout in layouts),
        title="(a) Smallest bucket pinned: granules measured / planned",
    )
    for size in sweep.knobs.capacities:
        table.add_row(f"{size:,}", *(_cell(sweep, point) for point in sweep.pinned if point.min_bucket == size))
    return table


def _free_table(sweep: Sweep) -> Table:
    table = Table("layout", "growth", title="(b) Nothing pinned, by tokens: granules measured / planned")
    for context in sweep.knobs.contexts:
        table.add_column(f"{context:,}", justify="right")
    rows: dict[tuple[str, str], list[str]] = {}
    for point in sweep.free:
        rows.setdefault((point.layout.cli_name, point.policy.value), []).append(_cell(sweep, point))
    for names, cells in rows.items():
        table.add_row(*names, *cells)
    return table


def _cell(sweep: Sweep, point: Point) -> str:
    granule = sweep.knobs.granule
    return f"{point.measured // granule:,} / {point.planned // granule:,} ({bytes_text(point.measured)})"


def _steps_table(sweep: Sweep) -> Table:
    title = f"(c) One step over a boundary: {sweep.knobs.boundary:,} → {sweep.knobs.boundary + 1:,} tokens"
    table = Table("layout", "growth", title=title)
    for header in ("bytes moved", "planned", "of these copied", "a captured graph is"):
        table.add_column(header, justify="right")
    for step in sweep.steps:
        numbers = (f"{number:,}" for number in (step.moved, step.planned_moved, step.copied))
        table.add_row(step.layout.cli_name, step.policy.value, *numbers, "kept" if step.kept else "invalidated")
    return table
