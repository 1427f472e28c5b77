"""Byte and token counts as people write them: click types that read `2MiB` and `512,8k`, and a function that writes."""

from __future__ import annotations

import re
from fractions import Fraction

import click

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def byte_count(text: str) -> int:
    """Read a number of bytes with an optional binary unit: `2MiB`, `64k`, `1.5G`, `4096`."""
    match = re.fullmatch(r"\s*(\d{1,19}(?:\.\d{1,9})?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    count = int(Fraction(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 1 <= count < 1 << 63:
        raise click.BadParameter(f"{text!r} is no size; write for example 2MiB, 64KiB or 4096")
    return count


def token_counts(text: str) -> tuple[int, ...]:
    """Read a comma-separated list of positive numbers of tokens: `512,8k`; `k` is 1,024."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(k?)\s*", part, re.IGNORECASE)
        if not match or int(match[1]) < 1:
            raise click.BadParameter(f"{part!r} is no number of tokens; write for example 512,8k,32768")
        counts.append(int(match[1]) << (10 if match[2] else 0))
    return tuple(counts)


def bytes_text(count: float) -> str:
    """Write a byte count with the largest binary unit that leaves at least 1, to three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
