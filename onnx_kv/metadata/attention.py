"""The `attention` block (heads, KV heads, head size, windows): from the graph's nodes, its ports, or the config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onnx_kv.metadata.check import layer_nodes
from onnx_kv.metadata.config import DecoderConfig
from onnx_kv.metadata.schema import MAX_TOKENS, Attention, Metadata

if TYPE_CHECKING:
    from onnx_kv.metadata.ports import GraphPorts


def attention_block(
    metadata: Metadata, config: DecoderConfig, graph: GraphPorts | None, layers: Sequence[int]
) -> Attention:
    """Describe the attention of each cached layer; `layers` are their indices in the model, for the config's window.

    Raises:
        MetadataError: neither the graph nor the config says a count.
    """
    nodes = layer_nodes(metadata, graph) if graph else [None] * len(layers)
    ports = [graph.inputs[layer.past_key] if graph else None for layer in metadata.layers]
    window, windowed = config.window()
    return Attention(
        query_heads=tuple(node.query_heads if node else _count(config, "num_attention_heads") for node in nodes),
        kv_heads=tuple(
            node.shape.kv_heads if node else (port and port.axis(1)) or _count(config, "num_key_value_heads")
            for node, port in zip(nodes, ports, strict=True)
        ),
        head_sizes=tuple(
            node.shape.head_dim if node else (port and port.axis(3)) or _count(config, "head_size")
            for node, port in zip(nodes, ports, strict=True)
        ),
        windows=tuple(
            node.window if node else window if windowed is None or layer in windowed else None
            for node, layer in zip(nodes, layers, strict=True)
        ),
    )


def overruled(metadata: Metadata, config: DecoderConfig, graph: GraphPorts) -> Iterator[str]:
    """Counts of the config that the graph's nodes overrule."""
    nodes = [node for node in layer_nodes(metadata, graph) if node]
    for key, actual in (
        ("num_attention_heads", {node.query_heads for node in nodes}),
        ("num_key_value_heads", {node.shape.kv_heads for node in nodes}),
        ("head_size", {node.shape.head_dim for node in nodes}),
    ):
        stated = config.decoder.count(key, MAX_TOKENS)
        if stated is not None and actual and actual != {stated}:
            yield f"{config.decoder.where(key)} is {stated}; the graph's attention nodes have {sorted(actual)}"


def _count(config: DecoderConfig, key: str) -> int:
    count = config.decoder.count(key, MAX_TOKENS)
    if count is None:
        raise config.decoder.missing(key)
    return count
