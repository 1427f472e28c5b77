"""Byte counts as people write them: a click type that reads `2MiB`, and a function that writes it."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


class ByteCount(click.ParamType):
    """A number of bytes with an optional binary unit: `2MiB`, `64k`, `1.5G`, `4096`."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _PATTERN.fullmatch(value.strip())
        count = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
        if count < 1:
            self.fail(f"{value!r} is no size; write for example 2MiB, 64KiB or 4096", param, ctx)
        return count


class TokenCounts(click.ParamType):
    """A comma-separated list of positive numbers of tokens: `512,8192`; `k` is 1,024."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        counts = []
        for text in value.split(","):
            match = re.fullmatch(r"\s*(\d+)(k?)\s*", text, re.IGNORECASE)
            if not match or int(match[1]) < 1:
                self.fail(f"{text!r} is no number of tokens; write for example 512,8k,32768", param, ctx)
            counts.append(int(match[1]) << (10 if match[2] else 0))
        return tuple(counts)


def bytes_text(count: int) -> str:
    """Write a byte count with the largest binary unit that leaves at least 1, to three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count != int(count) else f"{int(count)} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.3g} TiB"
