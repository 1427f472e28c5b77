"""Paths on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class OutputFile(click.Path):
    """A file to be written at the end of a long run: refused at its beginning where it could not be."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path.

        Raises:
            click.BadParameter: its folder does not exist or cannot be written, or it is a folder itself.
        """
        path = Path(str(super().convert(value, param, ctx)))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            self.fail(f"{str(path.parent)!r} is no folder that can be written to", param, ctx)
        return path
