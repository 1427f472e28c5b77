"""`onnx-kv bench`: measurements with their spread, every knob and version in the result. One command a file."""

from __future__ import annotations

import click

from onnx_kv.cli.bench.attention import decode, prefill
from onnx_kv.cli.bench.generate import generate
from onnx_kv.cli.bench.growth import growth


@click.group()
def command() -> None:
    """Measure one attention node, growth, and whole generations."""


for measurement in (decode, prefill, growth, generate):
    command.add_command(measurement)
