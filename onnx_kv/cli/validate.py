"""`onnx-kv validate`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from onnx_kv.metadata import validate_metadata


@click.command()
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_context
def command(ctx: click.Context, model_dir: Path, as_json: bool) -> None:
    """Check inference_metadata.yaml against the graph beside it.

    Every port exists once; element types, axes, heads, head sizes, pairing and layout agree. The graph wins.
    Exit code: 0 they agree, 1 they do not, 2 they could not be compared.
    """
    result = validate_metadata(model_dir)
    if as_json:
        report = {
            "agrees": result.agrees,
            "metadata": str(result.metadata_file),
            "graph": str(result.graph_file),
            "layers": len(result.metadata.layers),
            "kv_layout": result.metadata.kv_layout.yaml_name,
            "disagreements": [dataclasses.asdict(problem) for problem in result.disagreements],
            "notes": list(result.notes),
        }
        click.echo(json.dumps(report, indent=2))
    else:
        for problem in result.disagreements:
            click.echo(str(problem))
        for note in result.notes:
            click.echo(f"note: {note}", err=True)
        count = len(result.disagreements)
        verdict = "agrees with" if result.agrees else f"differs in {count} place{'s' if count > 1 else ''} from"
        click.echo(
            f"{result.metadata_file} {verdict} {result.graph_file} ({len(result.metadata.layers)} cached layers)"
        )
    ctx.exit(0 if result.agrees else 1)
