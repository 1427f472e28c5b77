"""Keeping an existing `inference_metadata.yaml` true when the graph beside it is patched."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from onnx_kv.layout import KvLayout
from onnx_kv.metadata.ports import model_ports
from onnx_kv.metadata.schema import FILE_NAME
from onnx_kv.metadata.yaml_edit import update_io
from onnx_kv.metadata.yaml_file import parse_metadata
from onnx_kv.metadata.yaml_text import LAYOUT_FIELD


def follow_graph(text: str, model: ir.Model, file: Path = Path(FILE_NAME)) -> str:
    """Return the text of a metadata file after a patch of its graph.

    `io.kv_layout` becomes the graph's; a mask that the graph no longer has gives way to the sequence lengths that it
    takes in its place. Everything else stays byte for byte.

    Args:
        text: the file's text, before the patch.
        model: the graph, after the patch.
        file: named in errors.

    Raises:
        MetadataError: the text is no metadata, or its entries cannot be changed alone.
    """
    metadata = parse_metadata(text, file)
    graph = model_ports(model, file)
    changes: dict[str, str | None] = {}
    if metadata.kv_layout is not graph.layout:
        changes[LAYOUT_FIELD] = None if graph.layout is KvLayout.HEAD_MAJOR else graph.layout.yaml_name
    mask = metadata.attention_mask_input
    if mask is not None and mask not in graph.inputs and graph.seqlens_k and graph.total_sequence_length:
        changes["attention_mask_input"] = None
        changes["seqlens_k_input"] = graph.seqlens_k
        changes["total_sequence_length_input"] = graph.total_sequence_length
    return update_io(text, changes, file) if changes else text
