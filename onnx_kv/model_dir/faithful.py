"""From a patched graph back to an ONNX file that lost nothing the source had.

`onnx_ir` does not model every field of ONNX (sparse initializers, training info, fields newer than itself). What a
model uses of those would vanish silently when it is written again: it is put back, or the model is refused by the
field's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from onnx_kv.errors import ModelDirError
from onnx_kv.model_dir.external_data import external_tensors
from onnx_kv.model_dir.source import ModelDir, root_cause

# Repeated fields that are maps by this key: their order means nothing.
_KEYS = {
    "opset_import": "domain",
    "metadata_props": "key",
    "external_data": "key",
    "quantization_annotation": "tensor_name",
}

# Declared types of inner values: onnx_ir keeps those of every value that exists and adds those of initializers.
_DERIVED = "value_info"


def check_faithful(model_dir: ModelDir, source: onnx.ModelProto, model: ir.Model) -> None:
    """Make sure that writing `model`, the untouched graph of `source`, gives back all that `source` says.

    Raises:
        ModelDirError: something would be lost; names the field.
    """
    try:
        lost = next(_lost(source, _serialize(model, source), "model"), None)
    except ir.serde.SerdeError as error:
        raise ModelDirError(f"{model_dir.model_file} cannot be written again: {root_cause(error)}") from error
    if lost is not None:
        raise ModelDirError(f"{model_dir.model_file} cannot be written again unchanged: {lost} would be lost")


def model_bytes(model: ir.Model, source: onnx.ModelProto) -> bytes:
    """Return the ONNX file of a patched graph whose source is `source`; the same graph gives the same bytes."""
    data: bytes = _serialize(model, source).SerializeToString(deterministic=True)
    return data


def _serialize(model: ir.Model, source: onnx.ModelProto) -> onnx.ModelProto:
    """Write `model`, with the entries of external tensors that onnx_ir leaves out (a checksum, for instance)."""
    proto: onnx.ModelProto = ir.to_proto(model)
    known = {_identity(tensor): tensor for tensor in external_tensors(source)}
    for tensor in external_tensors(proto):
        original = known.get(_identity(tensor))
        if original is not None:
            del tensor.external_data[:]
            tensor.external_data.extend(original.external_data)
    return proto


def _identity(tensor: onnx.TensorProto) -> tuple[str, ...]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return (tensor.name, *(entries.get(key, "") for key in ("location", "offset", "length")))


def _lost(source: Message, copy: Message, path: str) -> Iterator[str]:
    """Yield the paths of what `source` holds and `copy` lacks or holds otherwise."""
    if isinstance(source, onnx.TensorProto) and source.SerializeToString() == copy.SerializeToString():
        return  # millions of numbers, perhaps, compared at once
    if len(UnknownFieldSet(source)):
        yield f"{path}: a field that this version of onnx does not know"
    for descriptor, value in source.ListFields():
        name, there = descriptor.name, getattr(copy, descriptor.name)
        if name == _DERIVED:
            continue
        if isinstance(value, Message):
            yield from _lost(value, there, f"{path}.{name}")
        elif descriptor.message_type is not None:
            yield from _lost_items(name, value, there, f"{path}.{name}")
        elif _plain(name, value) != _plain(name, there):
            yield f"{path}.{name}"


def _lost_items(name: str, source: Sequence[Any], copy: Sequence[Any], path: str) -> Iterator[str]:
    if name in _KEYS:
        labels = [getattr(item, _KEYS[name]) for item in source]
        found = {getattr(item, _KEYS[name]): item for item in copy}
        others = [found.get(label) for label in labels]
    elif len(source) == len(copy):
        labels = [getattr(item, "name", "") or index for index, item in enumerate(source)]
        others = list(copy)
    else:
        yield path
        return
    for item, other, label in zip(source, others, labels, strict=True):
        if other is None:
            yield f"{path}[{label}]"
        else:
            yield from _lost(item, other, f"{path}[{label}]")


def _plain(name: str, value: Any) -> list[str]:
    """A scalar or list of scalars, comparable also where it is not a number.

    Names of absent optional outputs at a list's end mean nothing.
    """
    items = [repr(item) for item in ([value] if isinstance(value, str | bytes | int | float) else value)]
    while name == "output" and items and items[-1] == "''":
        items.pop()
    return items
