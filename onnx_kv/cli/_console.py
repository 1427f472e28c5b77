"""Where commands print their tables."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPE_WIDTH = 180


def output() -> Console:
    """The console of standard output: as wide as the terminal, and wide enough for every table in a pipe or a file."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
