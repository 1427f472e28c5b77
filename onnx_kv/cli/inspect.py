"""`onnx-kv inspect`: show a model's attention, its cache, the passes applied to it and those that could be."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onnx_kv.cli._console import output
from onnx_kv.graph import CacheLayer
from onnx_kv.inspection import Inspection, PassState, inspect_model


@click.command()
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def command(model_dir: Path, as_json: bool) -> None:
    """Show the attention nodes of MODEL_DIR, its cache geometry and layout, and what could be done to it."""
    inspection = inspect_model(model_dir)
    if as_json:
        click.echo(json.dumps(inspection.to_json(), indent=2))
    else:
        _show(inspection, output())


def _show(found: Inspection, console: Console) -> None:
    opsets = ", ".join(f"{domain or 'onnx'} {version}" for domain, version in found.opsets.items())
    layout = found.layout.cli_name if found.layout is not None else "no common layout"
    console.print(f"[bold]{escape(str(found.model_file))}[/]: IR version {found.ir_version}, opsets {escape(opsets)}")
    files = ", ".join(file.name for file in found.weight_files) or "no external file"
    console.print(f"weights: {found.weight_bytes:,} bytes in {escape(files)}")
    if found.attention_problem is not None:
        console.print(f"attention: {escape(found.attention_problem)}")
    elif not found.layers:
        console.print("cache: no GroupQueryAttention node has one")
    else:
        console.print(f"cache: {layout}, {len(found.layers)} layers, {found.bytes_per_token:,} bytes a token")
        console.print(_layer_table(found.layers))
    console.print(f"passes applied: {', '.join(found.passes) or 'none'}")
    console.print(_pass_table(found.states))


def _layer_table(layers: tuple[CacheLayer, ...]) -> Table:
    table = Table("layer", "node", "heads", "size", "type", "window", "token stride, offset", box=None)
    for index, layer in enumerate(layers):
        heads = f"{layer.query_heads}/{layer.shape.kv_heads}"
        window = "all" if layer.window is None else str(layer.window)
        place = "" if layer.token_stride is None else f"{layer.token_stride}, {layer.token_offset}"
        table.add_row(str(index), escape(layer.node), heads, str(layer.shape.head_dim), layer.dtype, window, place)
    return table


def _pass_table(states: tuple[PassState, ...]) -> Table:
    table = Table("pass", "state", "what it would do, or why not", box=None)
    for state in states:
        table.add_row(f"{state.name} {state.argument}".strip(), state.state, escape("\n".join(state.reasons)))
    return table
