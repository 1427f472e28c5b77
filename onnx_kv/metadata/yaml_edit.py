"""Changing one entry of an `inference_metadata.yaml` and nothing else: comments, order, quotes and line ends stay.

A patch that changes the layout of the graph's cache changes `io.kv_layout` of the file beside it in the same step. The
entry is spliced in where the parser says it stands; the result is parsed again and compared before it is returned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from onnx_kv.errors import MetadataError
from onnx_kv.layout import KvLayout
from onnx_kv.metadata.schema import FILE_NAME
from onnx_kv.metadata.yaml_file import parse
from onnx_kv.metadata.yaml_text import LAYOUT_FIELD

_BEFORE = "kv_inputs"
"""The entry that `kv_layout` is put in front of, as `yaml_text` does."""


def update_kv_layout(text: str, layout: KvLayout, file: Path = Path(FILE_NAME)) -> str:
    """Return the text of a metadata file with its layout changed.

    Args:
        text: the file's text.
        layout: what `io.kv_layout` is to say; head-major takes the entry out, as absent means head-major.
        file: named in errors.

    Raises:
        MetadataError: not YAML, no `model.io` with `kv_inputs`, or an entry that cannot be changed alone.
    """
    root, data = parse(text, file)
    io = _child(_child(root, "model", file), "io", file)
    entries = {key.value: (key, value) for key, value in io.value}
    if LAYOUT_FIELD not in entries:
        changed = text if layout is KvLayout.HEAD_MAJOR else _inserted(text, entries, layout, file)
    elif layout is KvLayout.HEAD_MAJOR:
        changed = _removed(text, io, layout)
    else:
        changed = _replaced(text, *entries[LAYOUT_FIELD], layout)
    _require_same_otherwise(data, parse(changed, file)[1], layout, file)
    return changed


def _child(node: yaml.MappingNode, key: str, file: Path) -> yaml.MappingNode:
    for name, value in node.value:
        if name.value == key and isinstance(value, yaml.MappingNode):
            return value
    raise MetadataError(f"{file}: missing mapping {key!r}; regenerate the file")


def _inserted(text: str, entries: dict[str, tuple[yaml.Node, yaml.Node]], layout: KvLayout, file: Path) -> str:
    if _BEFORE not in entries:
        raise MetadataError(f"{file}: missing key {_BEFORE!r} in model.io; regenerate the file")
    at = entries[_BEFORE][0].start_mark
    line = text[text.rfind("\n", 0, at.index) + 1 : at.index]
    # A key that begins its line gets a line of its own in front; one inside braces does not.
    newline = "\r\n" if "\r\n" in text else "\n"
    separator = ", " if line.strip() else newline + line
    return f"{text[: at.index]}{LAYOUT_FIELD}: {layout.yaml_name}{separator}{text[at.index :]}"


def _removed(text: str, io: yaml.MappingNode, layout: KvLayout) -> str:
    """Without the entry where only blanks part it from the next, else with head-major spelled out."""
    names = [key.value for key, _ in io.value]
    index = names.index(LAYOUT_FIELD)
    key, value = io.value[index]
    if index + 1 < len(io.value):
        after = io.value[index + 1][0].start_mark.index
        if not text[value.end_mark.index : after].strip(" \t\r\n,"):
            return text[: key.start_mark.index] + text[after:]
    return _replaced(text, key, value, layout)


def _replaced(text: str, key: yaml.Node, value: yaml.Node, layout: KvLayout) -> str:
    start, end = value.start_mark.index, value.end_mark.index
    return f"{text[:start]}{layout.yaml_name}{text[end:]}"


def _require_same_otherwise(before: Any, after: Any, layout: KvLayout, file: Path) -> None:
    named = after["model"]["io"].get(LAYOUT_FIELD, KvLayout.HEAD_MAJOR.yaml_name)
    for data in (before, after):
        data["model"]["io"].pop(LAYOUT_FIELD, None)
    if named != layout.yaml_name or before != after:
        raise MetadataError(f"{file}: {LAYOUT_FIELD} cannot be changed without changing more; regenerate the file")
