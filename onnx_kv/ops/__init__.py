"""The op library: C++ and CUDA sources, built into one shared object; `library_path` says where it was installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from onnx_kv.errors import RuntimeSetupError

LIBRARY_NAME = "libonnx_kv_ops.so"


def library_path() -> Path:
    """Return the path of the op library, of a plain or an editable install.

    Raises:
        RuntimeSetupError: the package runs from a checkout that was never installed.
    """
    beside = Path(__file__).parent / LIBRARY_NAME
    if beside.is_file():
        return beside
    try:
        installed = importlib.metadata.distribution("onnx-kv").locate_file(f"onnx_kv/ops/{LIBRARY_NAME}")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed is not None and Path(str(installed)).is_file():
        return Path(str(installed))
    raise RuntimeSetupError("the op library is not built; install the package: pip install '.[cpu]' (or '.[cuda]')")
