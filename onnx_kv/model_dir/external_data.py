"""The external data of a model: every tensor kept outside the ONNX file, checked without opening a data file.

Tensors are looked for in every field of the protobuf: initializers, attributes, branches and loop bodies, functions,
sparse tensors, training info. Tied weights, overlaps and any order of offsets are fine; a missing `length` follows from
type and shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import Message

from onnx_kv.errors import ModelDirError
from onnx_kv.model_dir.source import LFS_POINTER, ModelDir

_MOST_PROBLEMS = 5  # named in one refusal: a data file cut short has thousands


def check_external_data(model_dir: ModelDir, proto: onnx.ModelProto) -> frozenset[Path]:
    """Return the resolved paths of the data files that `proto` refers to.

    Raises:
        ModelDirError: a location is absolute, has `..` or leads out of the directory through a link; a file is missing,
            no regular file, or shorter than its tensors; an entry is no number. Names file, tensor and reason.
    """
    files: dict[str, tuple[Path, int]] = {}
    problems: list[str] = []
    for tensor in external_tensors(proto):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        try:
            if location not in files:
                real = _resolve(model_dir, location)
                files[location] = real, real.stat().st_size
            _check_range(tensor, entries, files[location][1])
        except ModelDirError as error:
            problems.append(f"{model_dir.path}: tensor {tensor.name!r}, data file {location!r}: {error}")
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        named = problems[:_MOST_PROBLEMS] + ([f"… and {more} tensors more"] if more > 0 else [])
        raise ModelDirError("\n".join(named))
    return frozenset(real for real, _ in files.values())


def external_tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Yield every tensor in `message` whose data is external, wherever it is nested."""
    for _, value in message.ListFields():
        for item in [value] if isinstance(value, Message) else value if _holds_messages(value) else ():
            if not isinstance(item, onnx.TensorProto):
                yield from external_tensors(item)
            elif item.data_location == onnx.TensorProto.EXTERNAL:
                yield item


def _holds_messages(value: Any) -> bool:
    return not isinstance(value, str | bytes | int | float) and len(value) > 0 and isinstance(value[0], Message)


def _resolve(model_dir: ModelDir, location: str) -> Path:
    parts = PureWindowsPath(location)  # takes / and \ for separators
    if not location or "\0" in location:
        raise ModelDirError("the location is empty or no file name")
    if parts.anchor:
        raise ModelDirError("the location is absolute; it must be relative to the model's folder")
    if ".." in parts.parts:
        raise ModelDirError("the location has '..'; it must stay in the model's folder")
    try:
        real = (model_dir.model_file.parent / location).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise ModelDirError(f"the file cannot be found: {getattr(error, 'strerror', None) or error}") from error
    if not model_dir.encloses(real):
        raise ModelDirError(f"it is a link to {real}, outside the model's directory; copy the file here instead")
    if not real.is_file():
        raise ModelDirError("it is not a regular file")
    try:
        with real.open("rb") as stream:
            head = stream.read(len(LFS_POINTER))
    except OSError as error:
        raise ModelDirError(f"the file cannot be read: {error.strerror}") from error
    if head == LFS_POINTER:
        raise ModelDirError("it is a Git LFS pointer, not the weights; run `git lfs pull`")
    return real


def _check_range(tensor: onnx.TensorProto, entries: dict[str, str], file_size: int) -> None:
    offset, length = (_number(entries, key) for key in ("offset", "length"))
    needed = _size(tensor)
    if length is not None and length < needed:
        raise ModelDirError(f"its length is {length} bytes, but its type and shape need {needed}")
    end = (offset or 0) + (needed if length is None else length)
    if end > file_size:
        raise ModelDirError(f"the file has {file_size} bytes, but the tensor ends at {end}")


def _number(entries: dict[str, str], key: str) -> int | None:
    text = entries.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise ModelDirError(f"its {key} {text!r} is not a number of bytes")
    return int(text)


def _size(tensor: onnx.TensorProto) -> int:
    """Bytes that type and shape of a tensor take; types below one byte are packed."""
    try:
        bits: int = ir.DataType(tensor.data_type).bitwidth
    except (ValueError, TypeError) as error:
        raise ModelDirError(f"its element type {tensor.data_type} cannot be external") from error
    if any(size < 0 for size in tensor.dims):
        raise ModelDirError(f"its shape {list(tensor.dims)} is negative")
    elements: int = math.prod(tensor.dims)
    return (elements * bits + 7) // 8
