"""Writing `inference_metadata.yaml`: whole or not at all, and never over something that was not meant."""

from __future__ import annotations

import os
from pathlib import Path

from onnx_kv.errors import MetadataError
from onnx_kv.metadata.config import CONFIG_FILE
from onnx_kv.metadata.generate import generate_metadata
from onnx_kv.metadata.schema import FILE_NAME, Metadata


def write_metadata(
    model_dir: str | Path, output: str | Path | None = None, *, force: bool = False, full: bool = False
) -> tuple[Path, Metadata]:
    """Generate a model's metadata and write it.

    Args:
        model_dir: directory with a `genai_config.json`.
        output: the file to write; `inference_metadata.yaml` in `model_dir` where it is None.
        force: whether an existing file is replaced.
        full: whether the `attention` block is written.

    Returns:
        The file that was written and what it says.

    Raises:
        MetadataError: the model cannot be described, or the file exists or cannot be written; then nothing was.
    """
    target = Path(model_dir) / FILE_NAME if output is None else Path(output)
    if not force and os.path.lexists(target):
        raise MetadataError(f"{target} exists; replace it with --force")
    special = os.path.exists(target) and not os.path.isfile(target)
    named_link = output is not None and os.path.islink(target)  # /dev/stdout; the directory's own is a hub cache's
    if special or named_link or target.name == CONFIG_FILE or target.suffix == ".onnx":
        raise MetadataError(f"{target} is not a file to write metadata to; its usual name is {FILE_NAME}")
    metadata = generate_metadata(model_dir, full=full)
    replace_text(target, metadata.to_yaml())
    return target, metadata


def replace_text(target: Path, text: str) -> None:
    """Write a file beside `target` and put it in its place by one rename.

    Raises:
        MetadataError: it cannot be written; `target` is as it was.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with draft.open("x", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise MetadataError(f"{target} cannot be written: {error.strerror}") from error
