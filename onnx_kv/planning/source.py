"""The geometry of a model's cache: read from a model directory or a bare `genai_config.json`, or written by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onnx_kv.errors import ConfigError
from onnx_kv.graph import attention_layers
from onnx_kv.layout import LayerShape
from onnx_kv.metadata.block import Block
from onnx_kv.metadata.json_file import read_object
from onnx_kv.metadata.schema import MAX_LAYERS, MAX_TOKENS
from onnx_kv.model_dir import ModelDir

_ELEMENT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MAX_HEADS = 1 << 16


@dataclass(frozen=True)
class ModelCache:
    """What a model stores for a token, the longest sequence it was made for, and where both were read."""

    layers: tuple[LayerShape, ...]
    dtype: str
    max_length: int
    source: str

    @property
    def element_size(self) -> int:
        """Bytes an element."""
        return _ELEMENT_SIZES[self.dtype]


def read_model_cache(path: Path, *, dtype: str | None = None, max_length: int | None = None) -> ModelCache:
    """Read a cache's geometry from a model directory, or from one config file, which knows no dtype.

    Args:
        path: a model directory, or a `genai_config.json`.
        dtype: element type of the cache; by default the graph's, or float16 for a bare config.
        max_length: tokens to plan for; by default the config's `context_length`.

    Raises:
        MetadataError: the config lacks a number, named with its place.
        ModelDirError: the directory holds no readable model.
        ConfigError: the dtype is none that a cache can have, or the model has no attention cache.
    """
    if path.is_dir():
        opened = ModelDir.open(path)
        found = attention_layers(opened.load())
        if not found:
            raise ConfigError(f"{opened.model_file} has no attention layer with a KV cache; there is nothing to plan")
        shapes = tuple(layer.shape for layer in found)
        dtype = dtype or found[0].dtype
        config = path / "genai_config.json"
        if max_length is None and not config.exists():
            raise ConfigError(f"{config} does not exist; without it, give the longest sequence by --max-length")
        limit = max_length or _context_length(Block(config, "", read_object(config)))
        source = str(opened.model_file)
    elif path.suffix == ".onnx":
        raise ConfigError(f"{path} is a graph; give its directory, or a genai_config.json")
    else:
        root = Block(path, "", read_object(path))
        shapes = _declared_layers(root)
        dtype = dtype or "float16"
        limit = max_length or _context_length(root)
        source = str(path)
    return _checked(shapes, dtype, limit, source)


def cache_of_geometry(geometry: str, *, dtype: str | None, max_length: int) -> ModelCache:
    """A cache of equal layers, written as layers x KV heads x head size: `48x8x128`; float16 unless told otherwise.

    Raises:
        ConfigError: the text is no geometry, or the dtype none that a cache can have.
    """
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", geometry)
    layers, kv_heads, head_dim = map(int, match.groups()) if match else (0, 0, 0)
    if not (1 <= layers <= MAX_LAYERS and 1 <= kv_heads <= _MAX_HEADS and 1 <= head_dim <= _MAX_HEADS):
        raise ConfigError(f"{geometry!r} is no geometry; write layers x KV heads x head size, for example 48x8x128")
    return _checked((LayerShape(kv_heads, head_dim),) * layers, dtype or "float16", max_length, geometry)


def _checked(shapes: tuple[LayerShape, ...], dtype: str, max_length: int, source: str) -> ModelCache:
    if dtype not in _ELEMENT_SIZES:
        raise ConfigError(f"a cache of {dtype} cannot be planned; use one of: {', '.join(_ELEMENT_SIZES)}")
    return ModelCache(shapes, dtype, max_length, source)


def _declared_layers(root: Block) -> tuple[LayerShape, ...]:
    decoder = _required(_required(root, "model"), "decoder")
    counts = {}
    for key, limit in (
        ("num_hidden_layers", MAX_LAYERS),
        ("num_key_value_heads", _MAX_HEADS),
        ("head_size", _MAX_HEADS),
    ):
        count = decoder.count(key, limit)
        if count is None:
            raise decoder.missing(key, "a plan from a config alone needs it; plan the model directory instead")
        counts[key] = count
    shape = LayerShape(counts["num_key_value_heads"], counts["head_size"])
    return (shape,) * counts["num_hidden_layers"]


def _context_length(root: Block) -> int:
    model = _required(root, "model")
    length = model.count("context_length", MAX_TOKENS)
    if length is None:
        raise model.missing("context_length", "or give --max-length")
    return length


def _required(parent: Block, key: str) -> Block:
    block = parent.block(key)
    if block is None:
        raise parent.missing(key)
    return block
