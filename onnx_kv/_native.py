"""Loads the op library once and turns its statuses into typed errors. Nothing else calls ctypes' loader."""

from __future__ import annotations

import ctypes
import functools

from onnx_kv.errors import ConfigError, DriverError, NativeError, OutOfMemoryError
from onnx_kv.ops import library_path

# The numbers of OnnxKvStatus in ops/capi.h.
_ERRORS: dict[int, type[NativeError] | type[ConfigError]] = {1: ConfigError, 2: OutOfMemoryError, 3: DriverError}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the op library.

    Raises:
        RuntimeSetupError: it is not built.
    """
    loaded = ctypes.CDLL(str(library_path()))
    loaded.onnx_kv_last_error.restype = ctypes.c_char_p
    return loaded


def check(status: int) -> None:
    """Raise the typed error of a failed call, with the library's message."""
    if status != 0:
        message = (library().onnx_kv_last_error() or b"").decode(errors="replace")
        raise _ERRORS.get(status, NativeError)(message)
