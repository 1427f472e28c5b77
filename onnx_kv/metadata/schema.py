"""What `inference_metadata.yaml` says, as data. Its text is written in `yaml_text.py` and read in `yaml_file.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx_kv.layout import KvLayout
from onnx_kv.metadata import yaml_text

FILE_NAME = "inference_metadata.yaml"

MAX_TOKENS = 2**31 - 1
"""Largest sequence length, head count and head size: what a 32-bit signed integer holds, as in ONNX Runtime GenAI."""

MAX_LAYERS = 10_000
"""Largest number of layers; more would be a mistake, and each layer costs four port names."""


@dataclass(frozen=True)
class LayerPorts:
    """The graph's ports of one layer's cache."""

    past_key: str
    past_value: str
    present_key: str
    present_value: str


@dataclass(frozen=True)
class Attention:
    """The `attention` block: one entry a cached layer, in the order of `Metadata.layers`.

    `windows` are in tokens, None where the layer sees everything.
    """

    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_sizes: tuple[int, ...]
    windows: tuple[int | None, ...]


@dataclass(frozen=True)
class Metadata:
    """How to drive a decoder: port names of its graph, its longest sequence, how its cache lies in memory.

    `max_sequence_length` is in tokens. `kv_inputs` and `kv_outputs` hold key, then value, of each cached layer; a
    layer's past and present have the same place in both. `warnings` say what was not understood, assumed or not checked
    when this was generated; they are no part of the file.
    """

    max_sequence_length: int
    token_input: str
    logits_output: str
    kv_inputs: tuple[str, ...]
    kv_outputs: tuple[str, ...]
    attention_mask_input: str | None = None
    position_ids_input: str | None = None
    seqlens_k_input: str | None = None
    total_sequence_length_input: str | None = None
    kv_layout: KvLayout = KvLayout.HEAD_MAJOR
    attention: Attention | None = None
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def layers(self) -> tuple[LayerPorts, ...]:
        """The cached layers, in order."""
        return tuple(
            LayerPorts(*self.kv_inputs[i : i + 2], *self.kv_outputs[i : i + 2])
            for i in range(0, len(self.kv_inputs), 2)
        )

    @property
    def inputs(self) -> dict[str, str]:
        """Every input port the file names: field (`io.token_input`, `io.kv_inputs[0]`, …) → port."""
        single = {name: getattr(self, name) for name in yaml_text.INPUT_FIELDS}
        return {f"io.{name}": port for name, port in single.items() if port is not None} | {
            f"io.kv_inputs[{i}]": port for i, port in enumerate(self.kv_inputs)
        }

    @property
    def outputs(self) -> dict[str, str]:
        """Every output port the file names: field → port."""
        return {"io.logits_output": self.logits_output} | {
            f"io.kv_outputs[{i}]": port for i, port in enumerate(self.kv_outputs)
        }

    def to_yaml(self) -> str:
        """The text of `inference_metadata.yaml`."""
        return yaml_text.render(self)
