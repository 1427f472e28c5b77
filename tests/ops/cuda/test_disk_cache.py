"""The cache of compiled kernels: private, checked, and never a reason to fail."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_kv._native import function

pytest.importorskip("nvidia", reason="no NVRTC here; pip install nvidia-cuda-nvrtc")

KEY = "onnx_kv/ops/gqa/cuda/append.cu DTYPE=1 HEAD_DIM=32"

_compile_cached = function(
    "onnx_kv_cuda_compile_cached",
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_uint64),
)


def machine_code(key: str = KEY, arch: str = "sm_80") -> bytes:
    image, size = ctypes.create_string_buffer(1 << 20), ctypes.c_uint64()
    _compile_cached(key.encode(), arch.encode(), image, len(image), ctypes.byref(size))
    return image.raw[: size.value]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache lies; not made yet. (The library asks the environment at every use.)"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "onnx-kv" / "kernels"


def test_an_entry_is_made_in_a_private_folder_and_read_back(folder: Path) -> None:
    first = machine_code()
    assert first.startswith(b"\x7fELF")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (entry,) = folder.iterdir()
    written = entry.stat().st_mtime_ns
    assert machine_code() == first
    assert entry.stat().st_mtime_ns == written


def test_entries_differ_by_architecture_and_constants(folder: Path) -> None:
    codes = {machine_code(), machine_code(arch="sm_90a"), machine_code(KEY.replace("32", "40"))}
    assert len(codes) == len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign", "folder"])
def test_a_damaged_or_foreign_entry_is_compiled_anew(folder: Path, damage: str) -> None:
    good = machine_code()
    (entry,) = folder.iterdir()
    content = bytearray(entry.read_bytes())
    match damage:
        case "cut":
            entry.write_bytes(content[:-1])
        case "flip":
            content[-100] ^= 1
            entry.write_bytes(content)
        case "empty":
            entry.write_bytes(b"")
        case "foreign":
            entry.write_bytes(content.replace(b"HEAD_DIM=32", b"HEAD_DIM=48"))
        case "folder":
            entry.unlink()
            entry.mkdir()
    assert machine_code() == good
    if damage != "folder":
        assert machine_code() == good
        assert entry.read_bytes().endswith(good)


def test_a_link_in_an_entrys_place_is_not_followed(folder: Path, tmp_path: Path) -> None:
    good = machine_code()
    (entry,) = folder.iterdir()
    target = tmp_path / "target"
    entry.rename(target)
    entry.symlink_to(target)
    kept = target.read_bytes()
    assert machine_code() == good
    assert target.read_bytes() == kept
    assert not entry.is_symlink()


def test_a_folder_that_others_may_write_to_is_not_used(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert machine_code().startswith(b"\x7fELF")
    assert list(folder.iterdir()) == []


def test_an_impossible_folder_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert machine_code().startswith(b"\x7fELF")


def test_processes_that_race_all_get_the_same_code(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from tests.ops.cuda.test_disk_cache import machine_code; sys.stdout.buffer.write(machine_code())"
    )
    root = str(Path(__file__).parents[3])
    racers = [
        subprocess.Popen([sys.executable, "-c", script, root], stdout=subprocess.PIPE, env=os.environ) for _ in range(3)
    ]
    outputs = {racer.communicate()[0] for racer in racers}
    assert all(racer.returncode == 0 for racer in racers)
    assert outputs == {machine_code()}
    assert len(list(folder.iterdir())) == 1
