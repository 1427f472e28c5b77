"""`onnx-kv bench generate`: tokens a second of whole generations, one process a configuration, interleaved."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from onnx_kv.bench.generate import Configuration, bench_generate
from onnx_kv.cli._options import GROWTH
from onnx_kv.cli.bench._report import json_option, report


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=16), default=64, show_default=True)
@click.option("--max-length", type=click.IntRange(min=1), help="Tokens a sequence.  [default: the model's maximum]")
@click.option("--growth", type=GROWTH, multiple=True, default=("auto",), help="May be repeated.")
@click.option("--min-bucket", type=click.IntRange(min=1), multiple=True, help="Tokens; may be repeated.")
@click.option("--graph", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--against", type=click.Choice(["ort", "genai"]), multiple=True, help="Also measure this rival.")
@click.option(
    "--rival-model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Its unpatched model."
)
@json_option
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
    against: tuple[str, ...],
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
    if against and rival_model is None:
        raise click.UsageError("--against needs --rival-model, the unpatched directory of the same weights")
    for rival in against:
        configurations.append(
            _rival(rival, Path(str(rival_model)), device, graph, max_length, prompt_tokens + new_tokens)
        )
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


def _rival(name: str, model: Path, device: str, graph: str, max_length: int | None, needed: int) -> Configuration:
    """ONNX Runtime GenAI, or our decoder with ONNX Runtime's own attention kernels."""
    if name == "genai":
        settings = {"device": device, "graph": graph != "off", "max_length": max_length or needed}
        return Configuration("genai", model, settings, rival=True)
    stock: dict[str, str | int] = {"device": device, "graph": graph, "stock": True}
    return Configuration("onnxruntime", model, stock | ({"max_length": max_length} if max_length else {}))
