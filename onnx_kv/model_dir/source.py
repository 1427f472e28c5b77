"""Opening a model directory: which file is the decoder, what its config says, its graph without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx_ir as ir

from onnx_kv.errors import ModelDirError

CONFIG_FILE = "genai_config.json"


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

    def load(self) -> ir.Model:
        """Parse the decoder's graph. Weights in external files are neither opened nor read.

        Raises:
            ModelDirError: the file is not an ONNX model.
        """
        try:
            return ir.load(self.model_file)
        except Exception as error:
            raise ModelDirError(f"{self.model_file} is not an ONNX model: {error}") from error


def _read_config(file: Path) -> dict[str, Any] | None:
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelDirError(f"{file} cannot be read: {error}") from error
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelDirError(f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    if not isinstance(config, dict):
        raise ModelDirError(f"{file} holds no JSON object")
    return config


def _configured_decoder(directory: Path, config: dict[str, Any]) -> Path:
    section: Any = config
    for key in ("model", "decoder", "filename"):
        section = section.get(key) if isinstance(section, dict) else None
    if not isinstance(section, str) or not section:
        raise ModelDirError(f"{directory / CONFIG_FILE} has no model.decoder.filename")
    relative = PurePosixPath(section)
    if relative.is_absolute() or ".." in relative.parts:
        raise ModelDirError(f"{directory / CONFIG_FILE}: model.decoder.filename {section!r} leaves the directory")
    file = directory / relative
    if not file.is_file():
        raise ModelDirError(f"{directory / CONFIG_FILE}: model.decoder.filename {section!r} does not exist")
    return file


def _find_decoder(directory: Path) -> Path:
    if (directory / "model.onnx").is_file():
        return directory / "model.onnx"
    files = sorted(directory.glob("*.onnx"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelDirError(
            f"{directory} has no {CONFIG_FILE}, no model.onnx and not exactly one ONNX file (found: {found})"
        )
    return files[0]
