"""Opening a model directory: which file is the decoder, what its config says, its graph without its weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
import onnx_ir as ir

from onnx_kv.errors import MetadataError, ModelDirError
from onnx_kv.metadata.json_file import read_object

CONFIG_FILE = "genai_config.json"

_PROTOBUF_LIMIT = 2**31 - 1  # bytes of one message
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class ModelDir:
    """A model directory that was opened; nothing in it is ever written.

    `path` is the directory, `model_file` the decoder's ONNX file in it, `genai_config` the parsed `genai_config.json`
    or None where there is none.
    """

    path: Path
    model_file: Path
    genai_config: dict[str, Any] | None

    @classmethod
    def open(cls, path: str | Path) -> ModelDir:
        """Find the decoder of the model directory `path`.

        It is `model.decoder.filename` of `genai_config.json`; without a config `model.onnx`, or the only ONNX file.

        Raises:
            ModelDirError: not a directory, no or several decoders, a config that cannot be read, a decoder file name
                that leaves the directory.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise ModelDirError(f"{directory} is not a directory; give the directory that holds the model's files")
        config = _read_config(directory / CONFIG_FILE)
        model_file = _find_decoder(directory) if config is None else _configured_decoder(directory, config)
        return cls(directory, model_file, config)

    def output_name(self, role: str) -> str:
        """What the config calls the decoder's output `role`; where it does not say, GenAI takes the role's own name.

        Raises:
            ModelDirError: the config's entry is no name.
        """
        section: Any = self.genai_config or {}
        for key in ("model", "decoder", "outputs"):
            section = section.get(key, {}) if isinstance(section, dict) else {}
        name = section.get(role, role) if isinstance(section, dict) else role
        if not isinstance(name, str):
            raise ModelDirError(f"{self.path / CONFIG_FILE}: model.decoder.outputs.{role} is not a name")
        return name

    def encloses(self, real: Path) -> bool:
        """Whether a resolved path belongs to this model: it lies in the directory, or beside the real model file.

        The second is what hub caches need, where every file is a link into one blob folder; ONNX Runtime draws the
        same line. A link to anywhere else could have been put there to make us copy somebody's private file.
        """
        homes = (self.path.resolve(), self.model_file.resolve().parent)
        return any(real.is_relative_to(home) for home in homes)

    @property
    def model_path(self) -> PurePosixPath:
        """Where the model file really lies in the directory, relative to it."""
        folder = self.model_file.parent.resolve().relative_to(self.path.resolve())
        return PurePosixPath(folder) / self.model_file.name

    def read_proto(self) -> onnx.ModelProto:
        """Parse the decoder's file. Weights in external files are neither opened nor read.

        Raises:
            ModelDirError: the file is not an ONNX model.
        """
        try:
            size = self.model_file.stat().st_size
            data = self.model_file.read_bytes() if size <= _PROTOBUF_LIMIT else b""
        except OSError as error:
            raise ModelDirError(f"{self.model_file} cannot be read: {error.strerror}") from error
        if size > _PROTOBUF_LIMIT:
            raise ModelDirError(
                f"{self.model_file} has {size} bytes, more than an ONNX file can have: {_PROTOBUF_LIMIT}"
            )
        if data.startswith(LFS_POINTER):
            raise ModelDirError(f"{self.model_file} is a Git LFS pointer, not the model; run `git lfs pull`")
        proto = onnx.ModelProto()
        try:
            proto.ParseFromString(data)
        except Exception as error:
            raise ModelDirError(f"{self.model_file} is not an ONNX model: {error}") from error
        if not proto.ir_version or not proto.graph.node:
            raise ModelDirError(f"{self.model_file} is not an ONNX model: it has no graph")
        return proto

    def build_graph(self, proto: onnx.ModelProto) -> ir.Model:
        """Return the graph of a model that `read_proto` parsed.

        Raises:
            ModelDirError: the graph contradicts itself, for instance two nodes write one value.
        """
        try:
            model = ir.from_proto(proto)
        except Exception as error:
            raise ModelDirError(f"{self.model_file} is not a valid ONNX model: {root_cause(error)}") from error
        ir.external_data.set_base_dir(model.graph, self.model_file.parent)
        return model

    def load(self) -> ir.Model:
        """Parse the decoder's graph. Weights in external files are neither opened nor read.

        Raises:
            ModelDirError: the file is not an ONNX model.
        """
        return self.build_graph(self.read_proto())


def root_cause(error: BaseException) -> BaseException:
    """What was found first: onnx_ir wraps an error once for every message around the one at fault."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _read_config(file: Path) -> dict[str, Any] | None:
    try:
        return read_object(file) if os.path.lexists(file) else None
    except MetadataError as error:
        raise ModelDirError(str(error)) from error


def _configured_decoder(directory: Path, config: dict[str, Any]) -> Path:
    file = directory / CONFIG_FILE
    section: Any = config
    for key in ("model", "decoder", "filename"):
        section = section.get(key) if isinstance(section, dict) else None
    if not isinstance(section, str) or not section or "\0" in section:
        raise ModelDirError(f"{file} names no decoder: it needs model.decoder.filename")
    relative = PurePosixPath(section)
    model_file = directory / relative
    outside = relative.is_absolute() or ".." in relative.parts
    if outside or not model_file.parent.resolve().is_relative_to(directory.resolve()):
        raise ModelDirError(f"{file}: model.decoder.filename {section!r} leaves the directory")
    if not model_file.is_file():
        raise ModelDirError(f"{file}: model.decoder.filename {section!r} is no file of the directory")
    return model_file


def _find_decoder(directory: Path) -> Path:
    if (directory / "model.onnx").is_file():
        return directory / "model.onnx"
    files = sorted(directory.glob("*.onnx"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelDirError(f"{directory} has no {CONFIG_FILE}, no model.onnx and not one ONNX file alone: {found}")
    return files[0]
