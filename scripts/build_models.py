#!/usr/bin/env python3
"""Makes the model directories that `models/` ships, with ONNX Runtime GenAI's own exporter.

python scripts/build_models.py tiny [--only NAME]... [--output DIR]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent


def export(checkpoint: Path, output: Path, precision: str, target: str, options: dict[str, str]) -> None:
    """Runs the exporter on a local checkpoint folder."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(checkpoint), "-o", str(output), "-p", precision, "-e", target]
    command += ["-c", str(checkpoint / "cache"), "--extra_options", "hf_token=false"]
    command += [f"{key}={value}" for key, value in options.items()]
    subprocess.run(command, check=True)


@click.group()
def main() -> None:
    """Make model directories with ONNX Runtime GenAI's exporter."""


@main.command()
@click.option("--only", multiple=True)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "models", show_default=True)
def tiny(only: tuple[str, ...], output: Path) -> None:
    """Make the shipped models."""
    from model_recipes import RECIPES, write_checkpoint

    for name, recipe in RECIPES.items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as checkpoint:
            write_checkpoint(recipe, Path(checkpoint))
            export(Path(checkpoint), output / name, recipe.precision, recipe.target, recipe.options)


if __name__ == "__main__":
    main()
