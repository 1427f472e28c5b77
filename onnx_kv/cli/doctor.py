"""`onnx-kv doctor`."""

from __future__ import annotations

import dataclasses
import json

import click

from onnx_kv.doctor import Status, examine

_COLOURS = {Status.OK: "green", Status.ABSENT: "yellow", Status.PROBLEM: "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Tell what this machine has for running patched models, and what to do where something is wrong.

    Exit code: 0 nothing to do, 1 something is wrong.
    """
    findings = examine()
    healthy = all(finding.status is not Status.PROBLEM for finding in findings)
    if as_json:
        report = {"healthy": healthy, "findings": [dataclasses.asdict(finding) for finding in findings]}
        click.echo(json.dumps(report, indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            status = click.style(f"{finding.status:7}", fg=_COLOURS[finding.status])
            click.echo(f"{finding.name:{width}}  {status}  {finding.detail}")
    ctx.exit(0 if healthy else 1)
