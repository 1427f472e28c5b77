"""Every kernel compiles for every architecture, on a machine without a GPU, and decode keeps to its registers.

A kernel's code is decided by dtype, head size and group size, and by what the device allows a block; the library itself
lists the specialisations that such a node needs (`onnx_kv_gqa_kernels`). The shapes below are one of each kind: a head
of one, two and four panels, with and without a remainder, with one and two blocks of query heads.
"""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from onnx_kv._native import function
from onnx_kv.errors import DriverError, UnsupportedError

pytest.importorskip("nvidia", reason="no NVRTC here; pip install nvidia-cuda-nvrtc")

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
SHAPES = [
    *((FLOAT16, head_dim, group) for head_dim in (64, 128, 256) for group in (4, 16)),
    (FLOAT16, 72, 1),
    (BFLOAT16, 128, 7),
    (FLOAT32, 64, 4),
    (FLOAT32, 128, 4),
]
# The widest: what compiles and fits for these does for their like.
WIDEST = [(FLOAT16, 128, 16), (FLOAT16, 256, 16), (FLOAT32, 128, 4)]
# Name for NVRTC, shared memory that a block may have, major compute capability (CUDA C++ Programming Guide, table 30).
ARCHITECTURES = [("sm_80", 163 << 10, 8), ("sm_90a", 227 << 10, 9), ("sm_100", 227 << 10, 10), ("sm_120", 99 << 10, 12)]

_kernels = function("onnx_kv_gqa_kernels", *(5 * [ctypes.c_int32]), ctypes.POINTER(ctypes.c_char), ctypes.c_uint64)
_compile = function(
    "onnx_kv_cuda_compile",
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_uint64,
)


def kernels(dtype: int, head_dim: int, group: int, shared_bytes: int, major: int) -> list[str]:
    text = ctypes.create_string_buffer(1 << 14)
    _kernels(dtype, head_dim, group, shared_bytes, major, text, len(text))
    return text.value.decode().splitlines()


def report(key: str, arch: str) -> str:
    """Compile; the assembler's report."""
    size, log = ctypes.c_uint64(), ctypes.create_string_buffer(1 << 16)
    _compile(key.encode(), arch.encode(), None, 0, ctypes.byref(size), log, len(log))
    assert size.value > 1000, f"{key} for {arch}: {size.value} bytes of machine code"
    return log.value.decode()


@pytest.mark.parametrize(("arch", "shared_bytes", "major"), ARCHITECTURES)
def test_every_specialisation_compiles_and_decode_does_not_spill(arch: str, shared_bytes: int, major: int) -> None:
    shapes = SHAPES if major < 10 else WIDEST
    keys = sorted({key for shape in shapes for key in kernels(*shape, shared_bytes, major)})
    assert {key.split()[0].rsplit("/", 1)[1] for key in keys} >= {"append.cu", "decode.cu", "prefill.cu"}
    with ThreadPoolExecutor(2) as pool:
        reports = dict(zip(keys, pool.map(lambda key: report(key, arch), keys), strict=True))
    for key, text in reports.items():
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", text)]
        assert registers, f"{key} for {arch}: no kernel in {text}"
        assert max(registers) <= 255
        spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", text))
        if "/decode.cu" in key:
            assert spilled == 0, f"{key} for {arch} spills {spilled} bytes: {text}"


def test_every_head_size_has_a_plan() -> None:
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        for head_dim in range(32, 257, 8):
            for _, shared_bytes, major in ARCHITECTURES:
                assert len(kernels(dtype, head_dim, 4, shared_bytes, major)) == 4


@pytest.mark.parametrize("head_dim", [24, 60, 264])
def test_other_head_sizes_are_refused_by_name(head_dim: int) -> None:
    with pytest.raises(UnsupportedError, match=f"head size {head_dim} is not supported"):
        kernels(FLOAT16, head_dim, 4, 163 << 10, 8)


def test_a_compile_error_is_the_compilers_own() -> None:
    with pytest.raises(DriverError, match="HEAD_DIM"):
        report("onnx_kv/ops/gqa/cuda/append.cu DTYPE=1", "sm_80")
