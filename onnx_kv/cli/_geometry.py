"""Which cache a command is about: a model directory, a genai_config.json, or a geometry written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from onnx_kv.planning.source import ModelCache, cache_of_geometry, read_model_cache

Function = TypeVar("Function", bound=Callable[..., Any])

BATCH = click.IntRange(1, 1 << 16)
"""Rows that a command may plan or make; more are a slip."""

_OPTIONS = (
    click.argument("model", required=False, type=click.Path(path_type=Path)),
    click.option("--geometry", metavar="LxNxD", help="Instead of MODEL: layers x KV heads x head size, e.g. 48x8x128."),
    click.option("--max-length", type=click.IntRange(min=1), help="Tokens reserved a row.  [default: context_length]"),
    click.option("--dtype", help="Element type of the cache.  [default: the graph's; else float16]"),
)


def geometry_options(function: Function) -> Function:
    """Add the argument and options that `model_cache` reads."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def model_cache(model: Path | None, geometry: str | None, max_length: int | None, dtype: str | None) -> ModelCache:
    """The cache that the options name.

    Raises:
        click.UsageError: not exactly one of MODEL and `--geometry`, or the latter without `--max-length`.
    """
    if (model is None) == (geometry is None):
        raise click.UsageError("give either MODEL (a model directory or a genai_config.json) or --geometry")
    if model is not None:
        return read_model_cache(model, dtype=dtype, max_length=max_length)
    if max_length is None:
        raise click.UsageError("--geometry needs --max-length: a geometry knows no longest sequence")
    return cache_of_geometry(str(geometry), dtype=dtype, max_length=max_length)
