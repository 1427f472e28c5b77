"""Temporary copies of a model in another layout."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path

from onnx_kv.errors import ModelDirError
from onnx_kv.layout import KvLayout
from onnx_kv.patching import patch_model


def patched_copy(source: Path, folder: Path, layout: KvLayout, *, lift_sequence_lengths: bool | None = None) -> Path:
    """Return a directory of `source`'s model in `layout`: itself where patching changes nothing, else one in `folder`.

    The weights are hard links where the file systems allow it.

    Raises:
        ModelDirError, PatchRefusedError: as `patch_model`.
    """
    copy = folder / layout.cli_name
    if copy.exists():
        return copy
    patch = functools.partial(patch_model, source, copy, layout, lift_sequence_lengths=lift_sequence_lengths)
    if not patch(dry_run=True).rewritten:
        return source
    if os.stat(source).st_dev == os.stat(folder).st_dev:
        with suppress(ModelDirError):  # hard links are not possible everywhere, copies are
            patch(link=True)
            return copy
    patch()
    return copy
