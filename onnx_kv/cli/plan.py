"""`onnx-kv plan`: what a model's cache will cost, by layout, growth policy and context, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from onnx_kv.cli._console import output
from onnx_kv.cli._geometry import BATCH, geometry_options, model_cache
from onnx_kv.cli._paths import OutputFile
from onnx_kv.cli._units import byte_count, bytes_text, token_counts
from onnx_kv.memory import MemoryPool
from onnx_kv.planning.plan import Cost, Plan, make_plan
from onnx_kv.planning.plot import plot_committed
from onnx_kv.planning.source import ModelCache

_GRANULE = 2 << 20  # of NVIDIA data-centre GPUs
_DEFAULT_CONTEXTS = (512, 2048, 8192, 32768, 131072)


@click.command()
@geometry_options
@click.option("--contexts", type=token_counts, help="Tokens a sequence, e.g. 512,8k,32k.  [default: up to the maximum]")
@click.option("--batch", type=BATCH, default=1, show_default=True, help="Sequences.")
@click.option(
    "--min-bucket", type=click.IntRange(min=1), default=256, show_default=True, help="Smallest bucket, tokens."
)
@click.option("--granularity", type=byte_count, help="Bytes that a mapping commits.  [default: 2MiB]")
@click.option("--device", help="Ask this device for its granularity: cpu, cuda or cuda:N.")
@click.option("--memory", type=byte_count, help="Find the longest context that fits these bytes, e.g. 16GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--plot", type=OutputFile(), help="Draw committed bytes over context into this PNG or SVG.")
def command(
    model: Path | None,
    geometry: str | None,
    max_length: int | None,
    dtype: str | None,
    contexts: tuple[int, ...] | None,
    batch: int,
    min_bucket: int,
    granularity: int | None,
    device: str | None,
    memory: int | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Plan the KV cache of MODEL, a model directory or a genai_config.json.

    Committed bytes follow from the model's geometry by arithmetic; nothing is loaded or measured.
    """
    if granularity and device:
        raise click.UsageError("give either --granularity or --device, which is asked for it")
    granule = MemoryPool(device).granule if device else granularity or _GRANULE
    cache = model_cache(model, geometry, max_length, dtype)
    plan = make_plan(
        cache,
        contexts=contexts or _fitting(cache),
        batch=batch,
        granule=granule,
        min_bucket=min_bucket,
        memory=memory,
    )
    if plot is not None:
        plot_committed(cache, plot, batch=batch, granule=granule, min_bucket=min_bucket)
    if as_json:
        click.echo(json.dumps(_as_json(plan), indent=2))
    else:
        _print(plan)


def _fitting(cache: ModelCache) -> tuple[int, ...]:
    fitting = tuple(context for context in _DEFAULT_CONTEXTS if context < cache.max_length)
    return (*fitting, cache.max_length)


def _as_json(plan: Plan) -> dict[str, Any]:
    asked = plan.assumptions
    return {
        "model": {
            "source": plan.model.source,
            "layers": [[shape.kv_heads, shape.head_dim] for shape in plan.model.layers],
            "dtype": plan.model.dtype,
            "max_length": plan.model.max_length,
            "token_bytes": plan.token_bytes,
        },
        "knobs": {"batch": asked.batch, "granule": asked.granule, "min_bucket": asked.min_bucket},
        "contexts": list(asked.contexts),
        "costs": [
            {
                "layout": cost.layout.cli_name,
                "policy": cost.policy.value,
                "floor_bytes": cost.floor,
                "committed_bytes": list(cost.committed),
                "moved_bytes": list(cost.moved),
                "longest_context": cost.longest,
            }
            for cost in plan.costs
        ],
        "crossover_tokens": {layout.cli_name: tokens for layout, tokens in plan.crossover.items()},
        "shareable_from_tokens": {layout.cli_name: tokens for layout, tokens in plan.shareable_from.items()},
        "recommended": plan.recommended.cli_name,
        "reason": plan.reason,
    }


def _print(plan: Plan) -> None:
    console, model, asked = output(), plan.model, plan.assumptions
    shapes = sorted({(shape.kv_heads, shape.head_dim) for shape in model.layers})
    heads = ", ".join(f"{kv_heads} KV heads of {head_dim}" for kv_heads, head_dim in shapes)
    console.print(
        f"{model.source}: {len(model.layers)} attention layers, {heads}, {model.dtype}; "
        f"{bytes_text(plan.token_bytes)} a token; at most {model.max_length:,} tokens",
        highlight=False,
    )
    console.print(
        f"Assumed: batch {asked.batch}, granule {bytes_text(asked.granule)}, "
        f"smallest bucket {asked.min_bucket} tokens\n",
        highlight=False,
    )
    console.print(_committed_table(plan))
    console.print(_facts_table(plan))
    console.print(f"Recommended: [bold]{plan.recommended.cli_name}[/]: {plan.reason}.", highlight=False)


def _committed_table(plan: Plan) -> Table:
    table = Table("layout", "growth", "floor", title="Committed bytes by context (moved by growth on the way)")
    for context in plan.assumptions.contexts:
        table.add_column(f"{context:,}", justify="right")
    if plan.costs[0].longest is not None:
        table.add_column("longest that fits", justify="right")
    for cost in plan.costs:
        table.add_row(cost.layout.cli_name, cost.policy.value, bytes_text(cost.floor), *_cells(cost))
    return table


def _cells(cost: Cost) -> list[str]:
    cells = [
        bytes_text(committed) + (f" ({bytes_text(moved)})" if moved else "")
        for committed, moved in zip(cost.committed, cost.moved, strict=True)
    ]
    return cells if cost.longest is None else [*cells, f"{cost.longest:,}"]


def _facts_table(plan: Plan) -> Table:
    table = Table("layout", "no waste from", "prefix shareable from", title="At a fixed stride, in tokens")
    for layout, crossover in plan.crossover.items():
        shareable = f"{plan.shareable_from[layout]:,}"
        table.add_row(layout.cli_name, "the first" if crossover is None else f"{crossover:,}", shareable)
    return table
