"""One object of `genai_config.json`, read by type: every error says the file, the key and where it stands."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_kv.errors import MetadataError
from onnx_kv.metadata.json_file import type_name

_repr = reprlib.Repr()
_repr.maxstring = 120


@dataclass(frozen=True)
class Block:
    """The object at `path` (`model.decoder`; empty for the top level) of the config `file`."""

    file: Path
    path: str
    values: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def where(self, key: str) -> str:
        """The key's full name, e.g. `model.decoder.filename`."""
        return f"{self.path}.{key}" if self.path else key

    def block(self, key: str) -> Block | None:
        """The object under `key`; None where it is absent, null or empty, which all declare nothing."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.mistyped(key, "an object")
        return Block(self.file, self.where(key), value)

    def blocks(self) -> Iterator[Block]:
        """Every object directly in this one."""
        for key, value in self.values.items():
            if isinstance(value, dict):
                yield Block(self.file, self.where(key), value)

    def text(self, key: str) -> str | None:
        """The string under `key`; None where it is absent or empty, which both declare nothing.

        Raises:
            MetadataError: not a string, or one that UTF-8 (and so ONNX) cannot hold.
        """
        if key not in self.values:
            return None
        value = self.values[key]
        if not isinstance(value, str):
            raise self.mistyped(key, "a string")
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise self.error(key, f"{value!r} holds half a surrogate pair")
        return value or None

    def count(self, key: str, limit: int) -> int | None:
        """The integer under `key`, at least 1 and at most `limit`; None where it is absent.

        Raises:
            MetadataError: anything else (a boolean, 8192.0, "8192", 0, a number beyond `limit`).
        """
        if key not in self.values:
            return None
        value = self.values[key]
        if type(value) is not int:
            raise self.mistyped(key, "an integer")
        if not 1 <= value <= limit:
            raise self.error(key, f"{show(value)} is not between 1 and {limit:,}")
        return value

    def missing(self, key: str, reason: str = "") -> MetadataError:
        """The error of a key that has to be there."""
        return MetadataError(
            f"{self.file}: missing key {key!r} in {self.path or 'the top level'}{reason and f'; {reason}'}"
        )

    def error(self, key: str, reason: str) -> MetadataError:
        """The error of a key that cannot be used."""
        return MetadataError(f"{self.file}: {self.where(key)}: {reason}")

    def mistyped(self, key: str, wanted: str) -> MetadataError:
        """The error of a value of the wrong type."""
        value = self.values[key]
        return self.error(key, f"{show(value)} is a JSON {type_name(value)}, not {wanted}")


def show(value: object) -> str:
    """A value for a message, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return _repr.repr(value)
