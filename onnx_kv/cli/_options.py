"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from onnx_kv.geometry import GrowthPolicy
from onnx_kv.runtime.config import GraphMode

Function = TypeVar("Function", bound=Callable[..., Any])

GROWTH = click.Choice(["auto", *(policy.value.replace("_", "-") for policy in GrowthPolicy)])
_GRAPH = click.Choice([mode.value for mode in GraphMode])
_RUNTIME_OPTIONS = (
    click.option("--device", help="cpu, cuda or cuda:N.  [default: cpu]"),
    click.option("--growth", type=GROWTH, help="How the cache grows.  [default: auto, the layout's own]"),
    click.option("--min-bucket", type=int, metavar="TOKENS", help="Smallest bucket of a cache that grows in buckets."),
    click.option("--graph", type=_GRAPH, help="Capture decode steps as a CUDA graph.  [default: auto]"),
    click.option("--prefill-chunk", type=int, metavar="TOKENS", help="Tokens of a prompt that run at once."),
)


def runtime_options(function: Function) -> Function:
    """Add the options that become settings of a decoder; each is None where it was not given."""
    for option in reversed(_RUNTIME_OPTIONS):
        function = option(function)
    return function


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given on the command line; the others are the environment's or the default."""
    return {name: value for name, value in settings.items() if value is not None}
