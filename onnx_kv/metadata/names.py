"""Which name a port goes by: declared for the decoder, named elsewhere in the config, or ONNX Runtime GenAI's default.

Only a declared name stands without a graph. The others count where the graph has such a port, and are warned about.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from onnx_kv.metadata.block import Block
from onnx_kv.metadata.config import DecoderConfig
from onnx_kv.metadata.template import PLACEHOLDER, Template

if TYPE_CHECKING:
    from onnx_kv.metadata.ports import GraphPorts

DEFAULTS = {
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
    "logits": "logits",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}
"""The names that ONNX Runtime GenAI takes where a config is silent. `position_ids` is not taken, only declared."""


class Names:
    """Resolves keys of `model.decoder.inputs` and `.outputs`; `warnings` says which names were not declared there."""

    def __init__(self, config: DecoderConfig, graph: GraphPorts | None) -> None:
        self.config = config
        self.graph = graph
        self.warnings: list[str] = []

    def optional(self, block: Block, key: str) -> str | None:
        """The port's name or template, None where nothing names one.

        Raises:
            MetadataError: several other blocks name different ports that the graph has.
        """
        declared = block.text(key)
        if declared is not None or self.graph is None:
            return declared
        ports = self.ports(block)
        candidates = {name: where for where, name in self.config.elsewhere(block, key) if ports_of(name, ports)}
        if len(candidates) > 1:
            found = ", ".join(f"{where} {name!r}" for name, where in candidates.items())
            raise block.missing(key, f"several other blocks name ports that the graph has: {found}")
        if not candidates and ports_of(DEFAULTS.get(key, ""), ports):
            candidates = {DEFAULTS[key]: "ONNX Runtime GenAI's defaults"}
        for name, where in candidates.items():
            self.warnings.append(f"{block.where(key)} is not declared; took {name!r} from {where}, as the graph has it")
        return next(iter(candidates), None)

    def required(self, block: Block, key: str) -> str:
        """The port's name or template.

        Raises:
            MetadataError: as `optional`, and where nothing names one.
        """
        name = self.optional(block, key)
        if name is not None:
            return name
        if self.graph is None:
            raise block.missing(key)
        ports = ", ".join(map(repr, self.ports(block))) or "none"
        raise block.missing(key, f"the graph has no port of the default name {DEFAULTS[key]!r}; it has: {ports}")

    def template(self, block: Block, key: str) -> Template:
        """A per-layer name.

        Raises:
            MetadataError: as `required`, and where it is no template.
        """
        text = self.required(block, key)
        try:
            return Template.parse(text)
        except ValueError as error:
            raise block.error(key, str(error)) from error

    def ports(self, block: Block) -> Collection[str]:
        """The graph's ports on the side that a block of the config names."""
        if self.graph is None:
            return ()
        return self.graph.inputs if block is self.config.inputs else self.graph.outputs


def ports_of(name: str, ports: Collection[str]) -> list[str]:
    """The ports that a name or a template stands for."""
    if PLACEHOLDER not in name:
        return [name] if name in ports else []
    try:
        template = Template.parse(name)
    except ValueError:
        return []
    return [port for port in ports if template.layer(port) is not None]
