"""The op library in the oldest and the newest ONNX Runtime that we support, and in one that is too old."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_kv.ops import library_path

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["1.23.2", "1.32.0"])
def test_supported_versions(version: str) -> None:
    folder = Path(sys.prefix) / f"ort-{version}"
    if not (folder / "onnxruntime").is_dir():
        pytest.skip(f"onnxruntime {version} is not in {folder}; `make test` puts it there")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.version_probe"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [version, "agrees", "refuses"]


def test_a_version_that_is_too_old() -> None:
    """A runtime that has no API of the version asked for: the library says so through the oldest API."""
    messages: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    def create_status(_code: int, message: bytes) -> int:
        messages.append(message)
        return 0x1234

    oldest_api = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p))

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    def get_api(version: int) -> int | None:
        return ctypes.addressof(oldest_api) if version == 1 else None

    version_text = ctypes.create_string_buffer(b"1.20.1")

    @ctypes.CFUNCTYPE(ctypes.c_void_p)
    def get_version() -> int:
        return ctypes.addressof(version_text)

    base = (ctypes.c_void_p * 2)(*(ctypes.cast(f, ctypes.c_void_p) for f in (get_api, get_version)))
    register = ctypes.CDLL(str(library_path())).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 0x1234
    assert messages == [b"ONNX Runtime 1.20.1 is too old for onnx_kv; install 1.23 or newer"]
