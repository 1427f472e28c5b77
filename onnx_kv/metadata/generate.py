"""From `genai_config.json`, and the graph beside it, to `Metadata`.

The graph is asked first: which layers have a cache, whether a name exists, whether a sequence length comes in as a
port; what differs from it is an error. Without a graph (it need not have been downloaded) the config is taken at its
word, so it has to declare every name and count and may not contradict itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_kv.errors import MetadataError
from onnx_kv.layout import KvLayout
from onnx_kv.metadata.attention import attention_block, overruled
from onnx_kv.metadata.bare import refuse_absent_names
from onnx_kv.metadata.block import Block
from onnx_kv.metadata.check import disagreements, repeated_ports, unchecked
from onnx_kv.metadata.config import DecoderConfig
from onnx_kv.metadata.names import Names, ports_of
from onnx_kv.metadata.schema import Metadata
from onnx_kv.metadata.template import Template

if TYPE_CHECKING:
    from onnx_kv.metadata.ports import GraphPorts


def generate_metadata(model_dir: str | Path, *, full: bool = False) -> Metadata:
    """Describe the decoder of a model directory.

    Args:
        model_dir: directory with a `genai_config.json`; the graph it names is read too where it is there.
        full: also fill in `Metadata.attention`.

    Raises:
        MetadataError: the config or the graph cannot be read, they contradict each other, or the model is of a kind
            that the schema cannot describe; names the file, the key or port, and the reason.
    """
    config = DecoderConfig.read(Path(model_dir))
    file = config.graph_file()
    graph = _read_graph(file)
    names = Names(config, graph)
    _refuse_other_kinds(config, names)
    templates = {
        key: names.template(block, key)
        for block, key in (
            (config.inputs, "past_key_names"),
            (config.inputs, "past_value_names"),
            (config.outputs, "present_key_names"),
            (config.outputs, "present_value_names"),
        )
    }
    layers = list(range(_declared_layers(config))) if graph is None else _cached_layers(config, graph, templates)
    metadata = Metadata(
        max_sequence_length=config.context_length,
        token_input=names.required(config.inputs, "input_ids"),
        attention_mask_input=_mask(config, graph, names),
        position_ids_input=_position_ids(config, graph, names),
        seqlens_k_input=graph.seqlens_k if graph else None,
        total_sequence_length_input=graph.total_sequence_length if graph else None,
        logits_output=names.required(config.outputs, "logits"),
        kv_inputs=_pairs(layers, templates["past_key_names"], templates["past_value_names"]),
        kv_outputs=_pairs(layers, templates["present_key_names"], templates["present_value_names"]),
        kv_layout=graph.layout if graph else KvLayout.HEAD_MAJOR,
    )
    warnings = [*_config_warnings(config), *names.warnings]
    warnings += _checked_alone(config, metadata, file) if graph is None else _checked(config, metadata, graph, layers)
    if full:
        metadata = replace(metadata, attention=attention_block(metadata, config, graph, layers))
    return replace(metadata, warnings=tuple(warnings))


def _read_graph(file: Path) -> GraphPorts | None:
    """The graph's ports; None where there is no file, or no package to read it with."""
    if not os.path.lexists(file):
        return None
    try:
        from onnx_kv.metadata.ports import read_ports
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("onnx_kv"):
            raise
        return None
    return read_ports(file)


def _refuse_other_kinds(config: DecoderConfig, names: Names) -> None:
    problems = [f"{block.where(key)}{_named(block, key, names)}: {reason}" for block, key, reason in config.refused()]
    kinds = config.not_attention()
    if kinds and names.graph is None:
        problems.append(
            f"model.decoder.layer_types has {', '.join(kinds)}: only the graph can say which layers have a KV cache, "
            "and recurrent or convolution state has no schema yet"
        )
    if problems:
        raise MetadataError("\n".join(f"{config.file}: {problem}" for problem in problems))


def _named(block: Block, key: str, names: Names) -> str:
    """What a refused key names, for its message: the graph's ports where there are any, else the key's own value."""
    value = block.values[key]
    if not isinstance(value, str):
        return ""
    named = ports_of(value, names.ports(block)) or [value]
    return f" ({', '.join(map(repr, named))})"


def _declared_layers(config: DecoderConfig) -> int:
    if config.num_hidden_layers is None:
        raise config.decoder.missing("num_hidden_layers")
    return config.num_hidden_layers


def _cached_layers(config: DecoderConfig, graph: GraphPorts, templates: Mapping[str, Template]) -> list[int]:
    """The layers that have a cache in the graph, whatever `num_hidden_layers` says.

    Raises:
        MetadataError: there are none, or a layer lacks one of its four ports.
    """
    found = {
        key: template.layers(graph.inputs if key.startswith("past") else graph.outputs)
        for key, template in templates.items()
    }
    layers = sorted(set().union(*found.values()))
    missing = [repr(templates[key].name(layer)) for key in found for layer in layers if layer not in found[key]]
    missing = missing or ([] if layers else [repr(str(template)) for template in templates.values()])
    if missing:
        raise MetadataError(f"{graph.file}: the graph lacks ports that {config.file} declares: {', '.join(missing)}")
    return layers


def _mask(config: DecoderConfig, graph: GraphPorts | None, names: Names) -> str | None:
    """The mask's port; None where the graph takes lengths in its place, or nothing says that there is a mask."""
    if graph is None:
        return names.required(config.inputs, "attention_mask")
    name = names.optional(config.inputs, "attention_mask")
    lifted = graph.seqlens_k is not None and graph.total_sequence_length is not None
    return None if lifted and name not in graph.inputs else name


def _position_ids(config: DecoderConfig, graph: GraphPorts | None, names: Names) -> str | None:
    key = "position_ids"
    name = names.optional(config.inputs, key)
    if name is None and graph and key in graph.inputs and graph.inputs[key].fed:
        raise config.inputs.missing(key, f"the graph reads an input {graph.inputs[key]}")
    return name


def _config_warnings(config: DecoderConfig) -> list[str]:
    unknown = [f"unknown key {key} is ignored" for key in config.unknown()]
    return unknown + [f"{block} is a model of its own and is not described" for block in config.drafters()]


def _checked(config: DecoderConfig, metadata: Metadata, graph: GraphPorts, layers: list[int]) -> list[str]:
    """Refuse metadata that the graph contradicts; return where it overrules the config."""
    problems = disagreements(metadata, graph)
    if problems:
        raise MetadataError("\n".join(f"{graph.file}: {problem}" for problem in problems))
    warnings = [*config.contradictions(), *overruled(metadata, config, graph)]
    declared = config.num_hidden_layers
    if declared is not None and layers != list(range(declared)):
        warnings.append(
            f"model.decoder.num_hidden_layers is {declared}; the graph has cache ports for layers "
            f"{', '.join(map(str, layers))}, and those are listed"
        )
    return warnings + unchecked(metadata, graph)


def _checked_alone(config: DecoderConfig, metadata: Metadata, file: Path) -> list[str]:
    """Refuse a config that contradicts itself; return why the graph was not asked."""
    problems = [*config.contradictions(), *map(str, repeated_ports(metadata))]
    if problems:
        raise MetadataError("\n".join(f"{config.file}: {problem}" for problem in problems))
    if not os.path.lexists(file):
        return [f"{file} is not here: the ports were not checked against the graph"]
    refuse_absent_names(metadata, file)
    return [
        f"{file} was not read, for which the package onnx_ir is needed: the ports were not checked against the graph"
    ]


def _pairs(layers: list[int], key: Template, value: Template) -> tuple[str, ...]:
    return tuple(template.name(layer) for layer in layers for template in (key, value))
