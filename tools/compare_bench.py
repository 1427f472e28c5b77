#!/usr/bin/env python3
"""Compare two benchmark results: `compare_bench.py BASE.json HEAD.json`.

Prints a table, and with --markdown one for a pull request. Exit code 0: no regression, 1: at least one, 2: the files
could not be compared.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from onnx_kv.bench.compare import Difference, Verdict, compare
from onnx_kv.bench.result import Result
from onnx_kv.errors import OnnxKvError

HEADINGS = ("row", "base", "head", "slowdown", "noise bound", "verdict")


def cells(difference: Difference) -> tuple[str, ...]:
    """Return a difference as the texts of a table row."""
    base, head = (f"{row.median:.4g} {row.unit}" if row else "–" for row in (difference.base, difference.head))
    slowdown = "–" if difference.slowdown is None else f"{difference.slowdown:.3f} ×"
    bound = "–" if difference.bound is None else f"± {difference.bound:.1%}"
    return difference.name, base, head, slowdown, bound, difference.verdict.value


def markdown(differences: list[Difference]) -> str:
    """Return the differences as a markdown table, regressions first."""
    ordered = sorted(differences, key=lambda difference: difference.verdict is not Verdict.REGRESSION)
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(cells(difference) for difference in ordered)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


@click.command(help=__doc__)
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("head", type=click.Path(path_type=Path))
@click.option("--threshold", default=0.03, show_default=True, help="Smallest relative difference that counts.")
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path), help="Also write a markdown table here.")
def main(base: Path, head: Path, threshold: float, markdown_path: Path | None) -> None:
    """Run the comparison."""
    try:
        differences = compare(Result.load(base), Result.load(head), threshold=threshold)
    except OnnxKvError as error:
        raise click.UsageError(str(error)) from error
    if not any(difference.slowdown for difference in differences):
        raise click.UsageError("the two results have no row with the same name and knobs: nothing was compared")
    table = Table(*HEADINGS)
    for difference in differences:
        table.add_row(*cells(difference))
    Console().print(table)
    if markdown_path:
        markdown_path.write_text(markdown(differences), encoding="utf-8")
    raise SystemExit(any(difference.verdict is Verdict.REGRESSION for difference in differences))


if __name__ == "__main__":
    main()
