"""Reading a JSON object from a file that may be anything: a pointer, a link's text, half a download, a device.

Refused, with the file and, where there is one, the place in it: what is not a regular file, is larger than `MAX_BYTES`,
stands for another file (a Git LFS pointer, a symbolic link that was checked out as text), is not UTF-8, starts with a
byte-order mark, is not JSON (`NaN` and trailing commas are not), names a key twice, or is not one object.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from onnx_kv.errors import MetadataError

MAX_BYTES = 16 << 20
"""Far above any real configuration (a few kilobytes), far below what would hurt to read."""

_LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
_PATH_BYTES = 4096


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object that `file` holds.

    Raises:
        MetadataError: the file cannot be read as one; see the module's docstring.
    """
    data = read_bytes(file)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line, column = _place(data[: error.start])
        raise MetadataError(f"{file}:{line}:{column}: not UTF-8 text ({error.reason})") from error
    try:
        parsed = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise MetadataError(f"{file}:{_fault(error)}") from error
    except (ValueError, RecursionError) as error:
        raise MetadataError(f"{file}: {error}") from error
    if not isinstance(parsed, dict):
        raise MetadataError(f"{file}: the top level is a JSON {type_name(parsed)}, not an object")
    return parsed


def read_bytes(file: Path) -> bytes:
    """Return the contents of a small regular file that stands for itself.

    Raises:
        MetadataError: missing, not a regular file, too large, or a stand-in for another file.
    """
    refuse_stand_in(file)
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise MetadataError(f"{file} has {size:,} bytes; a configuration has at most {MAX_BYTES:,}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise MetadataError(f"{file} cannot be read: {error.strerror}") from error


def refuse_stand_in(file: Path) -> None:
    """Refuse a file that is not there itself: missing, not a regular file, a Git LFS pointer, a link's target as text.

    Raises:
        MetadataError: names the file, what it is, and what to do.
    """
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):
            raise MetadataError(f"{file} is not a regular file")
        with file.open("rb") as stream:
            head = stream.read(_PATH_BYTES + 1)
    except FileNotFoundError as error:
        if os.path.islink(file):
            raise MetadataError(f"{file} is a symbolic link to {file.readlink()}, which does not exist") from error
        raise MetadataError(f"{file} does not exist") from error
    except OSError as error:
        raise MetadataError(f"{file} cannot be read: {error.strerror}") from error
    if head.startswith(_LFS_PREFIX):
        raise MetadataError(f"{file} is a Git LFS pointer, not the file itself; fetch it with: git lfs pull")
    target = _link_text(head)
    if target is not None:
        raise MetadataError(
            f"{file} holds only the path {target!r}: a symbolic link that was checked out as text; "
            "put the file itself in its place"
        )


def type_name(value: object) -> str:
    """What JSON calls the type of a parsed value."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _link_text(head: bytes) -> str | None:
    """The path that is all a short file consists of, None for every other file."""
    text = head.strip()
    one_word = len(head) <= _PATH_BYTES and all(0x20 < byte < 0x7F for byte in text)
    return text.decode("ascii") if one_word and b"/" in text and text[:1] not in b'{["' else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"one object names the key {key!r} twice")
        values[key] = value
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _fault(error: json.JSONDecodeError) -> str:
    """Line, column and reason; a trailing comma is told as such, where Python up to 3.12 points behind it."""
    before = error.doc[: error.pos].rstrip()
    if before.endswith(",") and error.doc[error.pos : error.pos + 1] in ("}", "]"):
        line, column = _place(before[:-1].encode())
        return f"{line}:{column}: not JSON: a trailing comma"
    return f"{error.lineno}:{error.colno}: not JSON: {error.msg}"


def _place(before: bytes) -> tuple[int, int]:
    """Line and column, both from 1, of what follows `before`; a character of several bytes is one column."""
    line_start = before.rfind(b"\n") + 1
    return before.count(b"\n") + 1, len(before[line_start:].decode(errors="replace")) + 1
