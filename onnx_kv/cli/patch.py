"""`onnx-kv patch`: write a copy of a model directory whose KV cache has another layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from onnx_kv.layout import KvLayout
from onnx_kv.patching import PatchReport, patch_model


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory to write.")
@click.option("--layout", required=True, type=click.Choice([x.cli_name for x in KvLayout]), help="Layout of the cache.")
@click.option("--link", is_flag=True, help="Hard-link the weights instead of copying them.")
@click.option("--force", is_flag=True, help="Replace OUTPUT if it is a model directory.")
@click.option("--dry-run", is_flag=True, help="Check and report everything, write nothing.")
@click.option(
    "--lift-sequence-lengths/--no-lift-sequence-lengths",
    default=None,
    help="Take sequence lengths as inputs in place of the attention mask. Cannot be undone.",
)
@click.option(
    "--last-token-logits/--no-last-token-logits",
    default=None,
    help="Compute the logits of the last position only, or of all again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    source: Path,
    output: Path,
    layout: str,
    link: bool,
    force: bool,
    dry_run: bool,
    lift_sequence_lengths: bool | None,
    last_token_logits: bool | None,
    as_json: bool,
) -> None:
    """Write a copy of the model directory SOURCE whose KV cache has another layout.

    The output appears complete or not at all, and SOURCE is never written. Head-major gives a model that stock ONNX
    Runtime loads; every other layout needs onnx_kv's op library.
    """
    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("copying", total=None)
        report = patch_model(
            source,
            output,
            layout,
            link=link,
            force=force,
            dry_run=dry_run,
            lift_sequence_lengths=lift_sequence_lengths,
            last_token_logits=last_token_logits,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else _text(report))


def _text(report: PatchReport) -> str:
    verb = "would write" if report.dry_run else "wrote"
    lines = [f"{verb} {report.output} ({report.layout.cli_name}) from {report.source}"]
    for outcome in report.passes:
        for change in outcome.changes or ("nothing to change",):
            lines.append(f"  {outcome.name}: {change}")
        lines += [f"  {outcome.name}: note: {note}" for note in outcome.notes]
    rewritten = ", ".join(report.rewritten) or "none, all files are byte for byte the source's"
    lines.append(f"  rewritten: {rewritten}")
    lines.append(f"  copied: {report.copied_bytes:,} bytes; hard-linked: {report.linked_bytes:,} bytes")
    lines += [f"  note: {note}" for note in report.notes]
    return "\n".join(lines)
