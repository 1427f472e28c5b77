"""`genai_config.json` as a declaration of ports and counts: what it names, what it may not name, what it gets wrong.

A model is judged by what its config declares and never by `model.type` or a folder's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from onnx_kv.errors import MetadataError
from onnx_kv.metadata import keys
from onnx_kv.metadata.block import Block, show
from onnx_kv.metadata.json_file import read_object
from onnx_kv.metadata.schema import MAX_LAYERS, MAX_TOKENS

CONFIG_FILE = "genai_config.json"


@dataclass(frozen=True)
class DecoderConfig:
    """The blocks of a config that describe one decoder, present and of the right types."""

    file: Path
    root: Block
    model: Block
    decoder: Block
    inputs: Block
    outputs: Block
    context_length: int
    num_hidden_layers: int | None

    @classmethod
    def read(cls, directory: Path) -> DecoderConfig:
        """Read the config of a model directory.

        Raises:
            MetadataError: not a directory, no readable config, or one that lacks the decoder or its context length.
        """
        if not os.path.isdir(directory):  # unlike Path.is_dir, False too for a path that cannot be looked up
            raise MetadataError(f"{directory} is not a directory; give the directory that holds {CONFIG_FILE}")
        file = directory / CONFIG_FILE
        root = Block(file, "", read_object(file))
        model = _required(root, "model")
        decoder = _required(model, "decoder")
        context_length = model.count("context_length", MAX_TOKENS)
        if context_length is None:
            raise model.missing("context_length")
        return cls(
            file=file,
            root=root,
            model=model,
            decoder=decoder,
            inputs=_ports_block(decoder, "inputs"),
            outputs=_ports_block(decoder, "outputs"),
            context_length=context_length,
            num_hidden_layers=decoder.count("num_hidden_layers", MAX_LAYERS),
        )

    def graph_file(self) -> Path:
        """The decoder's ONNX file, which need not exist: `filename` of the decoder, else `model.onnx`.

        Raises:
            MetadataError: the name leaves the directory.
        """
        name = self.decoder.text("filename") or "model.onnx"
        for path in (PurePosixPath(name), PureWindowsPath(name)):
            if path.is_absolute() or path.drive or ".." in path.parts:
                raise self.decoder.error("filename", f"{show(name)} leaves the model's directory")
        if "\0" in name:
            raise self.decoder.error("filename", f"{show(name)} is not a file name")
        return self.file.parent / name

    def elsewhere(self, ports: Block, key: str) -> Iterator[tuple[str, str]]:
        """What `inputs` (or `outputs`, as `ports` is) of other blocks of `model` name `key`: (full key, name)."""
        side = ports.path.rpartition(".")[2]
        for block in self.model.blocks():
            if block.path == self.decoder.path or not isinstance(block.values.get(side), dict):
                continue
            names = block.block(side)
            name = names.text(key) if names else None
            if names and name:
                yield names.where(key), name

    def refused(self) -> Iterator[tuple[Block, str, str]]:
        """Every key that declares something the schema cannot describe: (block, key, reason)."""
        tables = (
            (self.inputs, keys.REFUSED_INPUTS),
            (self.outputs, keys.REFUSED_OUTPUTS),
            (self.decoder, keys.REFUSED_DECODER),
            (self.model, keys.REFUSED_MODEL),
        )
        for block, table in tables:
            for key, reason in table.items():
                if block.values.get(key):
                    yield block, key, reason
        engine = self.root.block("engine")
        if engine and engine.values.get("dynamic_batching") is not None:
            yield engine, "dynamic_batching", keys.REFUSED_INPUTS["block_table"]

    def unknown(self) -> Iterator[str]:
        """The full names of keys that are not understood, in the blocks that are read."""
        blocks = [self.root, self.model, self.decoder, self.inputs, self.outputs]
        window = self.decoder.values.get("sliding_window")
        if isinstance(window, dict):
            blocks.append(Block(self.file, self.decoder.where("sliding_window"), window))
        for block in blocks:
            yield from (block.where(key) for key in block.values if key not in keys.KNOWN[block.path])

    def drafters(self) -> list[str]:
        """The blocks that describe a second, speculating model."""
        return [self.model.where(key) for key in keys.DRAFTERS if self.model.values.get(key)]

    def contradictions(self) -> Iterator[str]:
        """Counts of the config that cannot all be true."""
        layers = self.num_hidden_layers
        types = _array(self.decoder, "layer_types")
        if layers is not None and types is not None and len(types) != layers:
            yield f"model.decoder.layer_types has {len(types)} entries, num_hidden_layers is {layers}"
        heads = self.decoder.count("num_attention_heads", MAX_TOKENS)
        kv_heads = self.decoder.count("num_key_value_heads", MAX_TOKENS)
        if heads is not None and kv_heads is not None and heads % kv_heads:
            yield f"model.decoder.num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        _, windowed = self.window()
        beyond = [layer for layer in windowed or () if layers is not None and layer >= layers]
        if beyond:
            yield f"model.decoder.sliding_window.layers names {beyond[:5]}, num_hidden_layers is {layers}"

    def window(self) -> tuple[int | None, tuple[int, ...] | None]:
        """Size in tokens of the sliding window and the layers that have it (None: all); (None, None) without one.

        Raises:
            MetadataError: a window without a size, or a layer that is no index.
        """
        block = self.decoder.block("sliding_window")
        if block is None:
            return None, None
        size = block.count("window_size", MAX_TOKENS)
        if size is None:
            raise block.missing("window_size")
        layers = _array(block, "layers")
        for layer in layers or ():
            if type(layer) is not int or not 0 <= layer < MAX_LAYERS:
                raise block.error("layers", f"{show(layer)} is no layer's index")
        return size, None if layers is None else tuple(layers)

    def not_attention(self) -> list[str]:
        """The kinds of layer in `layer_types` that are not attention layers."""
        types = _array(self.decoder, "layer_types") or []
        return sorted(
            {show(kind) for kind in types if not (isinstance(kind, str) and kind in keys.ATTENTION_LAYER_TYPES)}
        )


def _required(parent: Block, key: str) -> Block:
    block = parent.block(key)
    if block is None:
        raise parent.missing(key)
    return block


def _ports_block(decoder: Block, key: str) -> Block:
    return decoder.block(key) or Block(decoder.file, decoder.where(key), {})


def _array(block: Block, key: str) -> list[Any] | None:
    value = block.values.get(key)
    if value is not None and not isinstance(value, list):
        raise block.mistyped(key, "an array")
    return value
