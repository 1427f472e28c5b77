from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto

from onnx_kv.model_dir.copying import copy_bytes
from tests.support.tiny_model import tiny_model, write_model_dir

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
MIB = 1 << 20

PATCH_AND_TELL_PEAK = """
import sys
from onnx_kv.patching import patch_model
patch_model(sys.argv[1], sys.argv[2], "seq-major", last_token_logits=True, lift_sequence_lengths=True)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def test_ten_gib_of_weights_are_patched_in_little_memory_and_stay_sparse(tmp_path: Path) -> None:
    model = tiny_model()
    huge = TensorProto(name="huge", data_type=TensorProto.FLOAT16, dims=[5, GIB], data_location=TensorProto.EXTERNAL)
    huge.external_data.add(key="location", value="huge.bin")
    model.graph.initializer.append(huge)
    source = write_model_dir(tmp_path / "m", model)
    with open(source / "huge.bin", "wb") as file:
        file.truncate(10 * GIB)
        for offset in (0, 3 * GIB + 12345, 10 * GIB - 7):
            os.pwrite(file.fileno(), b"weights", offset)
    if (source / "huge.bin").stat().st_blocks * 512 > GIB:
        pytest.skip("this file system keeps no holes")
    done = subprocess.run(
        [sys.executable, "-c", PATCH_AND_TELL_PEAK, source, tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 300 * MIB
    copy = tmp_path / "out" / "huge.bin"
    assert copy.stat().st_size == 10 * GIB
    assert copy.stat().st_blocks * 512 < MIB
    with open(copy, "rb") as file:
        for offset in (0, 3 * GIB + 12345, 10 * GIB - 7):
            assert os.pread(file.fileno(), 7, offset) == b"weights"


@pytest.mark.parametrize("kernel", ["copies", "refuses"])
@pytest.mark.parametrize("holes", ["told", "not told"])
def test_a_copy_is_equal_whatever_the_kernel_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, holes: str
) -> None:
    def cannot(*args: object) -> int:
        raise OSError(22, "Invalid argument")

    data = os.urandom(3 * MIB) + bytes(4 * MIB) + os.urandom(12345)
    (tmp_path / "source").write_bytes(data)
    with open(tmp_path / "source", "r+b") as file:  # a hole at the end, too
        file.truncate(len(data) + 2 * MIB)
    if kernel == "refuses":
        monkeypatch.setattr(os, "copy_file_range", cannot)
    if holes == "not told":
        monkeypatch.setattr(os, "lseek", cannot)
    told: list[int] = []
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "wb") as target:
        copy_bytes(source.fileno(), target.fileno(), len(data) + 2 * MIB, told.append)
    assert (tmp_path / "target").read_bytes() == data + bytes(2 * MIB)
    assert sum(told) == len(data) + 2 * MIB


def test_a_source_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"short")
    with (
        open(tmp_path / "source", "rb") as source,
        open(tmp_path / "target", "wb") as target,
        pytest.raises(OSError, match="became shorter"),
    ):
        copy_bytes(source.fileno(), target.fileno(), MIB, lambda count: None)
