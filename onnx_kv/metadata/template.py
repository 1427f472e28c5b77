"""Per-layer port names: a template with one `%d` that stands for the layer's index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PLACEHOLDER = "%d"


@dataclass(frozen=True)
class Template:
    """`past_key_values.%d.key`, taken apart at its placeholder."""

    prefix: str
    suffix: str

    @classmethod
    def parse(cls, text: str) -> Template:
        """Take a template apart.

        Raises:
            ValueError: not exactly one `%d`, or another `%`; the message says which.
        """
        prefix, placeholder, suffix = text.partition(PLACEHOLDER)
        if not placeholder:
            raise ValueError(f"{text!r} has no '%d' for the layer's index")
        if "%" in prefix + suffix:
            raise ValueError(f"{text!r} may hold one '%d' and no other '%'")
        return cls(prefix, suffix)

    def __str__(self) -> str:
        return f"{self.prefix}{PLACEHOLDER}{self.suffix}"

    def name(self, layer: int) -> str:
        """The port of a layer."""
        return f"{self.prefix}{layer}{self.suffix}"

    def layer(self, name: str) -> int | None:
        """The layer whose port `name` is; None where the template makes no such name."""
        digits = name[len(self.prefix) : len(name) - len(self.suffix)]
        if len(digits) > 9 or not (digits.isascii() and digits.isdigit()):
            return None
        layer = int(digits)
        return layer if self.name(layer) == name else None

    def layers(self, names: Iterable[str]) -> set[int]:
        """The layers that have a port among `names`."""
        return {layer for name in names if (layer := self.layer(name)) is not None}
