"""An existing `inference_metadata.yaml` against the graph beside it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from onnx_kv.errors import MetadataError, ModelDirError
from onnx_kv.metadata.attention import overruled
from onnx_kv.metadata.check import Disagreement, disagreements, unchecked
from onnx_kv.metadata.config import CONFIG_FILE, DecoderConfig
from onnx_kv.metadata.ports import read_ports
from onnx_kv.metadata.schema import FILE_NAME, Metadata
from onnx_kv.metadata.yaml_file import load_metadata
from onnx_kv.model_dir import ModelDir


@dataclass(frozen=True)
class Validation:
    """What came of comparing `metadata_file` with `graph_file`; the graph wins.

    `disagreements` are places where the metadata is wrong, `notes` what was left out or could not be compared.
    """

    metadata_file: Path
    graph_file: Path
    metadata: Metadata
    disagreements: tuple[Disagreement, ...]
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether there is nothing to correct."""
        return not self.disagreements


def validate_metadata(model_dir: str | Path) -> Validation:
    """Compare a directory's metadata with its graph and, where there is one, with its config's context length.

    Raises:
        MetadataError: there is nothing to compare: no readable metadata, no readable graph.
    """
    directory = Path(model_dir)
    if not directory.is_dir():
        raise MetadataError(f"{directory} is not a directory; give the directory that holds {FILE_NAME}")
    if not os.path.lexists(directory / FILE_NAME):
        raise MetadataError(f"{directory / FILE_NAME} does not exist; write it with: onnx-kv metadata {directory}")
    metadata = load_metadata(directory)
    config = DecoderConfig.read(directory) if os.path.lexists(directory / CONFIG_FILE) else None
    if config is None:
        try:
            graph_file = ModelDir.open(directory).model_file
        except ModelDirError as error:
            raise MetadataError(str(error)) from error
    else:
        graph_file = config.graph_file()
    graph = read_ports(graph_file)
    problems = disagreements(metadata, graph)
    notes = unchecked(metadata, graph)
    if config is not None:
        notes += overruled(metadata, config, graph)
        if metadata.max_sequence_length != config.context_length:
            says = f"{metadata.max_sequence_length}, but {CONFIG_FILE} has context_length {config.context_length}"
            problems.append(Disagreement("max_sequence_length", says))
    return Validation(directory / FILE_NAME, graph_file, metadata, tuple(problems), tuple(notes))
