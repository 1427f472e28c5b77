"""`onnx-kv parity`: run a model in several layouts and compare every token and logit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from onnx_kv.cli._console import output
from onnx_kv.cli._options import given, runtime_options
from onnx_kv.parity import ParityReport, check_parity
from onnx_kv.parity.check import LAYOUTS, PROMPT_LENGTHS, TOKENS
from onnx_kv.parity.compare import Difference, PromptComparison
from onnx_kv.parity.report import Verdict


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [int(word) for word in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,17,300") from None


@click.command()
@click.argument("model_dir", metavar="A", type=click.Path(path_type=Path))
@click.argument("other", metavar="[B]", required=False, type=click.Path(path_type=Path))
@click.option("--layouts", default=",".join(LAYOUTS), show_default=True, help="Layouts of A to compare.")
@click.option("--against", type=click.Choice(["stock"]), help="Also compare with ONNX Runtime's own attention.")
@click.option("--tokens", type=int, default=TOKENS, show_default=True, help="Tokens to generate after each prompt.")
@click.option(
    "--prompt-lengths",
    default=",".join(map(str, PROMPT_LENGTHS)),
    show_default=True,
    callback=_numbers,
    help="Tokens of each prompt.",
)
@runtime_options
@click.option("--json", "json_file", type=click.Path(path_type=Path, allow_dash=True), help="Write the report there.")
def command(
    model_dir: Path,
    other: Path | None,
    layouts: str,
    against: str | None,
    tokens: int,
    prompt_lengths: list[int],
    json_file: Path | None,
    **settings: Any,
) -> None:
    """Run model directory A in each layout, or A and B as they are, and compare tokens and logits of every step.

    Each configuration runs in a process of its own. Exit code 0: all the same, 1: something differs, 2: it could not
    be compared.
    """
    with _progress() as on_run:
        report = check_parity(
            model_dir,
            other,
            layouts=layouts.split(","),
            against_stock=against == "stock",
            tokens=tokens,
            prompt_lengths=prompt_lengths,
            on_run=on_run,
            **given(settings),
        )
    text = json.dumps(report.to_json(), indent=2)
    if json_file is not None and str(json_file) != "-":
        json_file.write_text(text + "\n", encoding="utf-8")
    if json_file is not None and str(json_file) == "-":
        click.echo(text)
    else:
        _print(report)
    raise SystemExit(0 if report.same else 1)


@contextmanager
def _progress() -> Iterator[Any]:
    """A receiver of configuration names that shows on a terminal which one runs."""
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield None
        return
    with console.status("reading the model") as status:
        yield lambda name: status.update(f"running {name}")


def _print(report: ParityReport) -> None:
    table = Table(
        "configuration", "layout", "prompt", "steps", "tokens", "logits and cache", "first difference", box=None
    )
    for verdict in report.verdicts:
        name, layout = verdict.configuration.name, verdict.recording.layout
        if verdict.reference is None:
            lengths = len(verdict.recording.runs)
            table.add_row(name, layout, f"{lengths} prompts", str(report.tokens), "reference", "reference", "")
        for prompt in verdict.prompts:
            table.add_row(name, layout, str(prompt.prompt_length), str(prompt.steps), *_cells(prompt))
        if verdict.failure is not None:
            table.add_row(name, layout, "", "", "failed", "failed", verdict.failure)
    output().print(table)
    for verdict in report.verdicts[1:]:
        click.echo(_conclusion(verdict))


def _cells(prompt: PromptComparison) -> tuple[str, str, str]:
    """What the table says of a prompt: tokens, logits, first difference."""
    tokens = "same" if prompt.first_token_difference is None else "differ"
    logits = "bitwise equal" if prompt.bitwise else f"within {prompt.relative:.1e} of the largest"
    first = prompt.first_token_difference or prompt.first_logit_difference
    return tokens, logits, "" if first is None else _difference(first)


def _difference(first: Difference) -> str:
    return f"step {first.step}: {first.max_abs:.3g} (margin {first.margin:.3g})"


def _conclusion(verdict: Verdict) -> str:
    wanted = "bit for bit" if verdict.exact else f"tokens; logits and cache within {verdict.tolerance:g} of the largest"
    outcome = "same as" if verdict.same else "DIFFERENT from"
    return f"{verdict.configuration.name}: {outcome} {verdict.reference} ({wanted})"
