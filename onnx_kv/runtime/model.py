"""What the runtime knows of a model directory before a session exists: ports, cached layers, layout, stop tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_kv.errors import ConfigError, ModelDirError
from onnx_kv.graph import CacheLayer, applied_passes, attention_layers
from onnx_kv.layout import KvLayout
from onnx_kv.metadata import FILE_NAME, Metadata, generate_metadata, load_metadata
from onnx_kv.model_dir import ModelDir
from onnx_kv.model_dir.external_data import check_external_data

_INT8_ACCURACY = 4  # of ONNX Runtime's MatMulNBits: activations may be computed with in int8
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class RuntimeModel:
    """A decoder that can be run: `layers` are its cached attention layers in the order of the graph's inputs.

    `passes` names what was done to the graph, `precision` the coarsest type that activations are rounded to (the
    cache's, or `int8`), `vocabulary` is the number of logits (None where neither graph nor config say it),
    `stop_tokens` are what ends a text.
    """

    directory: ModelDir
    metadata: Metadata
    layers: tuple[CacheLayer, ...]
    layout: KvLayout
    passes: tuple[str, ...]
    precision: str
    vocabulary: int | None
    stop_tokens: frozenset[int]

    @classmethod
    def open(cls, path: str | Path, layout: KvLayout | None = None) -> RuntimeModel:
        """Read the directory `path`.

        Raises:
            ModelDirError, MetadataError: it cannot be read, or has nothing to run.
            ConfigError: its layout is not `layout`.
        """
        directory = ModelDir.open(path)
        proto = directory.read_proto()
        check_external_data(directory, proto)
        graph = directory.build_graph(proto)
        layers = attention_layers(graph)
        if not layers:
            raise ModelDirError(f"{directory.model_file} has no GroupQueryAttention node with a KV cache")
        layouts = {layer.layout for layer in layers}
        if len(layouts) > 1:
            named = ", ".join(sorted(found.cli_name for found in layouts))
            raise ModelDirError(f"{directory.model_file} is patched by half: its nodes have the layouts {named}")
        if len({layer.dtype for layer in layers}) > 1:
            raise ModelDirError(f"{directory.model_file} has caches of several element types, which is not supported")
        found = layouts.pop()
        if layout is not None and layout is not found:
            raise ConfigError(
                f"{directory.path} has the layout {found.cli_name}, not {layout.cli_name}; "
                f"run: onnx-kv patch {directory.path} -o OUT --layout {layout.cli_name}"
            )
        described = (directory.path / FILE_NAME).is_file()
        metadata = load_metadata(directory.path) if described else generate_metadata(directory.path)
        return cls(
            directory=directory,
            metadata=metadata,
            layers=layers,
            layout=found,
            passes=applied_passes(graph),
            precision=_precision(graph, layers),
            vocabulary=_vocabulary(graph, metadata, directory),
            stop_tokens=_stop_tokens(directory),
        )


def _precision(graph: ir.Model, layers: tuple[CacheLayer, ...]) -> str:
    """`int8` where a quantised product may round its activations (`accuracy_level` 4 of MatMulNBits)."""
    for node in graph.graph.all_nodes():
        level = node.attributes.get("accuracy_level")
        if node.op_type == "MatMulNBits" and level is not None and level.as_int() == _INT8_ACCURACY:
            return "int8"
    return layers[0].dtype


def _vocabulary(graph: ir.Model, metadata: Metadata, directory: ModelDir) -> int | None:
    for output in graph.graph.outputs:
        if output.name == metadata.logits_output and output.shape and isinstance(output.shape[-1], int):
            return output.shape[-1]
    size = ((directory.genai_config or {}).get("model") or {}).get("vocab_size")
    return size if type(size) is int else None


def _stop_tokens(directory: ModelDir) -> frozenset[int]:
    """What ends a text: `eos_token_id`, a number or a list, of `genai_config.json` and `generation_config.json`."""
    found: set[int] = set()
    generation = directory.path / GENERATION_FILE
    model = (directory.genai_config or {}).get("model")
    for file, config in ((directory.path / "genai_config.json", model), (generation, _read_json(generation))):
        value = config.get("eos_token_id") if isinstance(config, dict) else None
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        for token in tokens:
            if type(token) is not int:
                raise ModelDirError(f"{file}: eos_token_id {value!r} is neither a token id nor a list of them")
            found.add(token)
    return frozenset(found)


def _read_json(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelDirError(f"{file} is not JSON: {error}") from error
