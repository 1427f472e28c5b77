"""`onnx-kv bench`: measurements with their spread, every knob and version in the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from onnx_kv.bench.generate import Configuration, bench_generate
from onnx_kv.bench.result import Result, Row, command_line, environment
from onnx_kv.cli._options import GROWTH


@click.group()
def command() -> None:
    """Measure decoding and generation; one process a configuration, interleaved."""


@command.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=16), default=64, show_default=True)
@click.option("--max-length", type=click.IntRange(min=1), help="Tokens a sequence.  [default: the model's maximum]")
@click.option("--growth", type=GROWTH, multiple=True, default=("auto",), help="May be repeated.")
@click.option("--min-bucket", type=click.IntRange(min=1), multiple=True, help="Tokens; may be repeated.")
@click.option("--graph", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--against", type=click.Choice(["genai"]), help="Also measure this rival, where it is installed.")
@click.option(
    "--rival-model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Its unpatched model."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the result here, for compare_bench.py."
)
def generate(
    models: tuple[Path, ...],
    device: str,
    prompt_tokens: int,
    new_tokens: int,
    max_length: int | None,
    growth: tuple[str, ...],
    min_bucket: tuple[int, ...],
    graph: str,
    repeats: int,
    against: str | None,
    rival_model: Path | None,
    json_path: Path | None,
) -> None:
    """Measure tokens a second of each of MODELS in each growth policy and smallest bucket."""
    configurations = []
    for model in models:
        for policy in growth:
            for bucket in min_bucket or (None,):
                settings: dict[str, str | int] = {"device": device, "growth": policy, "graph": graph}
                settings |= {"max_length": max_length} if max_length else {}
                settings |= {"min_bucket": bucket} if bucket else {}
                name = " ".join([model.name, policy, *([f"min-bucket {bucket}"] if bucket else [])])
                configurations.append(Configuration(name, model, settings))
    if against:
        if rival_model is None:
            raise click.UsageError("--against genai needs --rival-model, the unpatched directory of the same weights")
        rival = {"device": device, "graph": graph != "off", "max_length": max_length or prompt_tokens + new_tokens}
        configurations.append(Configuration("genai", rival_model, rival, rival=True))
    console = Console(stderr=True)
    with console.status("starting") as status:
        rows = bench_generate(
            configurations,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            progress=status.update,
        )
    report("generate", rows, device, json_path)


def report(title: str, rows: Sequence[Row], device: str, json_path: Path | None) -> None:
    """Print rows as a table with their notes, and write the result file."""
    table = Table("configuration", "median", "10–90 %", "samples", title=title)
    for row in rows:
        table.add_row(row.name, f"{row.median:.5g} {row.unit}", f"{row.low:.4g} – {row.high:.4g}", str(row.samples))
    console = Console()
    console.print(table)
    for row in rows:
        for note in row.notes:
            console.print(f"{row.name}: {note}", highlight=False)
    if json_path:
        result = Result(command_line(), environment(_device_facts(device)), tuple(rows))
        json_path.write_text(result.to_json(), encoding="utf-8")


def _device_facts(device: str) -> dict[str, str]:
    if not device.startswith("cuda"):
        return {"device": device}
    from onnx_kv import cuda  # loads the op library, which a CPU run of the rival alone does without

    info = cuda.device_info(int(device.partition(":")[2] or 0))
    return {"device": info.name, "driver": str(info.driver_version)}
