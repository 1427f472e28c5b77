"""`onnx-kv growth`: force a cache to grow in every layout and policy, and compare tokens and counters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from onnx_kv.cli._console import output
from onnx_kv.cli._units import token_counts
from onnx_kv.parity.growth import GrowthReport, reproduce_growth


@click.command()
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option(
    "--prompt-lengths", type=token_counts, default="5", show_default=True, help="Tokens of each row's prompt."
)
@click.option("--tokens", type=click.IntRange(min=2), default=48, show_default=True, help="Tokens to generate.")
@click.option("--min-bucket", type=click.IntRange(min=1), default=8, show_default=True, help="Smallest bucket, tokens.")
@click.option("--max-length", type=click.IntRange(min=2), default=512, show_default=True, help="Most tokens a row.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    model_dir: Path,
    prompt_lengths: tuple[int, ...],
    tokens: int,
    min_bucket: int,
    max_length: int,
    device: str,
    as_json: bool,
) -> None:
    """Run MODEL_DIR with a small bucket, so that its cache grows several times, in every layout and policy.

    Each row of the table is a process of its own. Exit code 0: tokens are equal everywhere and every counter is what
    the geometry says, 1: not, 2: it could not be run. Graphs are captured on CUDA alone.
    """
    console = Console(stderr=True)
    with console.status("patching") as status:
        report = reproduce_growth(
            model_dir,
            prompt_lengths=prompt_lengths,
            tokens=tokens,
            min_bucket=min_bucket,
            max_length=max_length,
            device=device,
            on_run=status.update if sys.stderr.isatty() else None,
        )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    raise SystemExit(0 if report.right else 1)


def _print(report: GrowthReport) -> None:
    headings = ("growths", "bytes moved", "captures", "replays", "invalidations", "keeps")
    table = Table("layout, policy", *headings, "physical bytes", "tokens", box=None)
    for row in report.rows:
        cells = [
            f"{value:,}" if value == row.expected[counter] else f"{value:,} (not {row.expected[counter]:,})"
            for counter, value in row.counted.items()
        ]
        table.add_row(row.case.name, *cells, f"{row.physical_kv_bytes:,}", "same" if row.same_tokens else "DIFFERENT")
    output().print(table)
    click.echo(", ".join(f"{knob} {value}" for knob, value in report.knobs.items()))
