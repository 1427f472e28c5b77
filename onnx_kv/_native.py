"""Loads the op library once and turns its statuses into typed errors. Nothing else calls ctypes' loader."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnx_kv.errors import ConfigError, DriverError, NativeError, OutOfMemoryError, UnsupportedError
from onnx_kv.ops import library_path

# The numbers of OnnxKvStatus in ops/capi.h.
_ERRORS: dict[int, type[NativeError] | type[ConfigError]] = {
    1: ConfigError,
    2: OutOfMemoryError,
    3: DriverError,
    4: UnsupportedError,
}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the op library.

    Raises:
        RuntimeSetupError: it is not built.
    """
    loaded = ctypes.CDLL(str(library_path()))
    loaded.onnx_kv_last_error.restype = ctypes.c_char_p
    if nvrtc := _packaged_nvrtc():
        loaded.onnx_kv_set_nvrtc_path(str(nvrtc).encode())
    return loaded


def _packaged_nvrtc() -> Path | None:
    """NVRTC as pip installs it (with `onnxruntime-gpu[cuda]`, say); without it the library asks the system's loader."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(package) or []:
                if file.name.startswith("libnvrtc.so"):
                    return Path(str(file.locate()))
    return None


def function(name: str, *argument_types: Any) -> Callable[..., None]:
    """Return a C function of the op library as one that takes plain numbers and raises the typed error it reports."""
    native: Any = None  # looked up at the first call, so that importing needs no library

    def call(*args: Any) -> None:
        nonlocal native
        if native is None:
            native = getattr(library(), name)
            native.argtypes = argument_types
        status = native(*args)
        if status != 0:
            check(status)

    return call


def check(status: int) -> None:
    """Raise the typed error of a failed call, with the library's message."""
    if status != 0:
        message = (library().onnx_kv_last_error() or b"").decode(errors="replace")
        raise _ERRORS.get(status, NativeError)(message)
