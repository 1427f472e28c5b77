"""A cache in a file: the live prefix of every row, to be loaded into a cache of any layout on any device.

The container is safetensors (8 bytes of header size, a JSON header, the tensors' bytes). Tensor `L.key.R` or
`L.value.R` holds row R of layer L as `[kv_heads, tokens, head_dim]`, whatever layout the cache had. Its metadata:

| key           | value                                                                                          |
|---------------|------------------------------------------------------------------------------------------------|
| `format`      | `onnx_kv.cache.1`                                                                              |
| `layout`      | the layout that the cache had, as `inference_metadata.yaml` spells it; informative             |
| `lengths`     | tokens of each row, as a JSON list                                                             |
| `fingerprint` | which model computed it; a cache of another model is refused                                   |

Tensors are written and read one after another, so that a long cache needs little host memory. A file appears under its
name when it is complete, and is checked as a whole before anything of it is loaded.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from onnx_kv.errors import CacheFileError
from onnx_kv.layout import Side
from onnx_kv.runtime.cache import KvCache

FORMAT = "onnx_kv.cache.1"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MAX_HEADER = 64 << 20


def save_cache(cache: KvCache, path: Path, fingerprint: str) -> None:
    """Write the live prefix of every row of `cache` to `path`; an older file there is replaced when it is complete."""
    tensors = _tensors(cache, cache.lengths)
    metadata = {
        "format": FORMAT,
        "layout": cache.geometry.layout.yaml_name,
        "lengths": json.dumps(cache.lengths),
        "fingerprint": fingerprint,
    }
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for layer in range(len(cache.geometry.layers)):
                for side in Side:
                    for row in range(cache.batch):
                        file.write(_bytes_of(np.ascontiguousarray(cache.read_row(layer, side, row))))
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def load_cache(cache: KvCache, path: Path, fingerprint: str) -> tuple[int, ...]:
    """Replace all rows of `cache` by those of a file; return their lengths.

    Raises:
        CacheFileError: the file is not a cache, or not one of this model, dtype, batch; the cache is as it was.
        CapacityError, OutOfMemoryError: there is no room for it; the cache is as it was.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise CacheFileError(f"cannot read {path}: {error.strerror}") from error
    with file:
        start, header = _read_header(file, path)
        lengths = _check(cache, header, fingerprint, path, os.fstat(file.fileno()).st_size - start)

        def row_of(layer: int, side: Side, row: int) -> npt.NDArray[Any]:
            entry = header[_name(layer, side, row)]
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            values = np.empty(entry["shape"], cache.dtype)
            if file.readinto(_bytes_of(values)) != end - begin:
                raise CacheFileError(f"{path} became shorter while it was read")
            return values

        cache.replace(lengths, row_of)
    return tuple(lengths)


def _name(layer: int, side: Side, row: int) -> str:
    return f"{layer}.{side.name.lower()}.{row}"


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """A C-contiguous array's own bytes."""
    return array.reshape(-1).view(np.uint8).data


def _tensors(cache: KvCache, lengths: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """The header's entries for a cache of these lengths, in the order of their bytes."""
    entries, offset = {}, 0
    for layer, shape in enumerate(cache.geometry.layers):
        for side in Side:
            for row, length in enumerate(lengths):
                dimensions = [shape.kv_heads, length, shape.head_dim]
                nbytes = math.prod(dimensions) * cache.dtype.itemsize
                entries[_name(layer, side, row)] = {
                    "dtype": _DTYPES[cache.dtype.name],
                    "shape": dimensions,
                    "data_offsets": [offset, offset + nbytes],
                }
                offset += nbytes
    return entries


def _read_header(file: BinaryIO, path: Path) -> tuple[int, dict[str, Any]]:
    size = int.from_bytes(file.read(8), "little")
    if size > min(_MAX_HEADER, os.fstat(file.fileno()).st_size):
        raise CacheFileError(f"{path} is not a safetensors file: its header would be {size} bytes")
    try:
        header = json.loads(file.read(size))
    except ValueError as error:
        raise CacheFileError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise CacheFileError(f"{path} is a safetensors file without the metadata of a cache")
    return 8 + size, header


def _check(cache: KvCache, header: dict[str, Any], fingerprint: str, path: Path, nbytes: int) -> list[int]:
    """Return the rows' lengths if `header` describes a cache that fits, with exactly the tensors it needs."""
    metadata = header["__metadata__"]
    if metadata.get("format") != FORMAT:
        raise CacheFileError(f"{path} has format {metadata.get('format')!r}; this version reads {FORMAT!r}")
    if metadata.get("fingerprint") != fingerprint:
        raise CacheFileError(
            f"{path} was computed by the model {metadata.get('fingerprint')!r}; this one is {fingerprint!r}"
        )
    try:
        lengths = json.loads(metadata.get("lengths", ""))
    except ValueError:
        lengths = None
    if not isinstance(lengths, list) or not all(isinstance(length, int) and length >= 0 for length in lengths):
        raise CacheFileError(f"{path} does not say how long its rows are: lengths is {metadata.get('lengths')!r}")
    if len(lengths) != cache.batch:
        raise CacheFileError(f"{path} holds {len(lengths)} rows; the cache has {cache.batch}")
    expected = _tensors(cache, tuple(lengths))
    found = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise CacheFileError(f"{path}: tensor {name} is {found.get(name)}; this cache needs {expected.get(name)}")
    if nbytes != max((entry["data_offsets"][1] for entry in expected.values()), default=0):
        raise CacheFileError(
            f"{path} has {nbytes} bytes of tensors, not what its header says; it is cut off or damaged"
        )
    return lengths
