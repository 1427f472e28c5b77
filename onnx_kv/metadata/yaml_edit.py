"""Changing entries of an `inference_metadata.yaml` and nothing else: comments, order, quotes and line ends stay.

Entries are spliced in and out where the parser says they stand; the result is parsed again and compared with what was
wanted before it is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from onnx_kv.errors import MetadataError
from onnx_kv.layout import KvLayout
from onnx_kv.metadata.schema import FILE_NAME
from onnx_kv.metadata.yaml_file import parse
from onnx_kv.metadata.yaml_text import LAYOUT_FIELD, scalar

# The entry that a new one is put in front of, so that it stands where `yaml_text` would write it.
_NEXT = {
    LAYOUT_FIELD: "kv_inputs",
    "seqlens_k_input": "logits_output",
    "total_sequence_length_input": "logits_output",
}


def update_kv_layout(text: str, layout: KvLayout, file: Path = Path(FILE_NAME)) -> str:
    """Return the text of a metadata file with its layout changed; head-major has no entry, as absent means it.

    Raises:
        MetadataError: as `update_io`.
    """
    return update_io(text, {LAYOUT_FIELD: None if layout is KvLayout.HEAD_MAJOR else layout.yaml_name}, file)


def update_io(text: str, changes: Mapping[str, str | None], file: Path = Path(FILE_NAME)) -> str:
    """Return the text of a metadata file with entries of `model.io` changed.

    Args:
        text: the file's text.
        changes: field → its new value, None to take the entry out.
        file: named in errors.

    Raises:
        MetadataError: not YAML, no `model.io`, or an entry that cannot be changed without changing more.
    """
    _, wanted = parse(text, file)
    _io(parse(text, file)[0], file)
    changed = text
    for field, value in changes.items():
        wanted["model"]["io"].pop(field, None)
        if value is not None:
            wanted["model"]["io"][field] = value
        changed = _with(changed, field, value, file)
    try:
        same = parse(changed, file)[1] == wanted
    except MetadataError:
        same = False
    if not same:
        raise MetadataError(
            f"{file}: {', '.join(changes)} cannot be changed alone; generate the file anew with --force"
        )
    return changed


def _with(text: str, field: str, value: str | None, file: Path) -> str:
    io = _io(parse(text, file)[0], file)
    names = [key.value for key, _ in io.value]
    if field not in names:
        return text if value is None else _inserted(text, io, names, field, value, file)
    index = names.index(field)
    if value is None:
        return _removed(text, io, index)
    old = io.value[index][1]
    return text[: old.start_mark.index] + scalar(value) + text[old.end_mark.index :]


def _inserted(text: str, io: yaml.MappingNode, names: list[str], field: str, value: str, file: Path) -> str:
    if _NEXT[field] not in names:
        raise MetadataError(f"{file}: missing key {_NEXT[field]!r} in model.io; generate the file anew with --force")
    at = io.value[names.index(_NEXT[field])][0].start_mark.index
    indent = text[text.rfind("\n", 0, at) + 1 : at]
    separator = ", " if io.flow_style else ("\r\n" if "\r\n" in text else "\n") + indent
    return f"{text[:at]}{field}: {scalar(value)}{separator}{text[at:]}"


def _removed(text: str, io: yaml.MappingNode, index: int) -> str:
    key, value = io.value[index]
    start, end = key.start_mark.index, value.end_mark.index
    if not io.flow_style:  # its whole line, with a comment behind it
        newline = text.find("\n", end)
        return text[: text.rfind("\n", 0, start) + 1] + (text[newline + 1 :] if newline >= 0 else "")
    if index + 1 < len(io.value):
        return text[:start] + text[io.value[index + 1][0].start_mark.index :]
    return text[: io.value[index - 1][1].end_mark.index if index else start] + text[end:]


def _io(root: yaml.MappingNode, file: Path) -> yaml.MappingNode:
    node = root
    for name in ("model", "io"):
        children = [value for key, value in node.value if key.value == name]
        if not children or not isinstance(children[0], yaml.MappingNode):
            raise MetadataError(f"{file}: missing mapping {name!r}; generate the file anew with --force")
        node = children[0]
    return node
