#!/usr/bin/env python3
"""Makes model directories with ONNX Runtime GenAI's own exporter (`pip install -e '.[cpu,export]'`).

`tiny` makes what `models/` ships, `shape` a model of a real size with random weights, for benchmarks. Of the latter
only `model.onnx` and the configuration need to travel: `fill`, which needs no exporter, writes the same weights
anywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import random_weights
from model_recipes import SHAPES, SHIPPED, Recipe

ROOT = Path(__file__).resolve().parent.parent


def build(recipe: Recipe, output: Path) -> None:
    """Makes `recipe`'s checkpoint, runs the exporter on it, and puts the result in place of `output`.

    Raises:
        click.ClickException: The exporter failed; what it printed is the message.
    """
    try:
        from checkpoints import write_checkpoint
    except ImportError as error:
        raise click.ClickException(f"{error}; install what exporting needs: pip install -e '.[cpu,export]'") from error

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, made = Path(scratch) / "checkpoint", Path(scratch) / "made"
        write_checkpoint(recipe, checkpoint)
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(checkpoint), "-o", str(made), "-p", recipe.precision, "-e", recipe.target]
        command += ["-c", str(Path(scratch) / "cache"), "--extra_options", "hf_token=false"]
        # Installed inside a checkout, the exporter would stamp that checkout's commit into the model as its own.
        environment = os.environ | {"GIT_DIR": os.devnull}
        export = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if export.returncode:
            raise click.ClickException(f"the exporter failed:\n{export.stdout}")
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, output)
    click.echo(f"{output}: {sum(file.stat().st_size for file in output.iterdir()):,} bytes")


@click.group()
def main() -> None:
    """Make model directories with ONNX Runtime GenAI's exporter."""


@main.command()
@click.option("--only", multiple=True, type=click.Choice(list(SHIPPED)), help="Make this one; may be repeated.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "models", help="Default: models/.")
def tiny(only: tuple[str, ...], output: Path) -> None:
    """Make the shipped models (a few minutes, most of them training qwen2-tiny)."""
    for name in only or SHIPPED:
        build(SHIPPED[name], output / name)


@main.command()
@click.argument("name", type=click.Choice(list(SHAPES)))
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--precision", help="The exporter's precision.  [default: the shape's, fp16]")
@click.option("--target", help="The exporter's execution provider.  [default: the shape's, cuda]")
@click.option("--max-length", default=32768, show_default=True, help="Context length, in tokens.")
@click.option("--graph-only", is_flag=True, help="Leave the data file to `fill`.")
@click.pass_context
def shape(
    context: click.Context,
    name: str,
    output: Path,
    precision: str | None,
    target: str | None,
    max_length: int,
    graph_only: bool,
) -> None:
    """Make a model of the shape of NAME with random weights."""
    recipe = SHAPES[name]
    recipe = replace(
        recipe,
        sizes=recipe.sizes | {"max_position_embeddings": max_length},
        precision=precision or recipe.precision,
        target=target or recipe.target,
    )
    build(recipe, output)
    (output / "model.onnx.data").unlink()
    if not graph_only:
        context.invoke(fill, directory=output)


@main.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--seed", default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--rope-theta", default=1e6, show_default=True, help="Base of the rotary frequencies.")
def fill(directory: Path, seed: int, rope_theta: float) -> None:
    """Write the data file that DIRECTORY/model.onnx asks for, with random weights."""
    written = random_weights.fill(directory, seed=seed, rope_theta=rope_theta)
    click.echo(f"{written}: {written.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
