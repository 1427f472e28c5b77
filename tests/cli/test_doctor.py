"""`onnx-kv doctor`: it tells, whatever is missing."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from onnx_kv import cuda, doctor
from onnx_kv.cli import main
from onnx_kv.errors import RuntimeSetupError, UnsupportedError
from onnx_kv.runtime import ort


def report():
    result = CliRunner().invoke(main, ["doctor", "--json"])
    parsed = json.loads(result.stdout)
    assert result.exit_code == (0 if parsed["healthy"] else 1)
    return {finding["name"]: finding for finding in parsed["findings"]}


def test_the_parts_it_tells_about():
    findings = report()
    assert {"onnx_kv", "ONNX Runtime", "op library", "op library in ONNX Runtime", "NVRTC"} <= findings.keys()
    assert any(name.startswith("GPU") for name in findings)
    assert findings["onnx_kv"]["status"] == "ok"


def test_for_people():
    result = CliRunner().invoke(main, ["doctor"])
    assert "Python 3." in result.stdout
    assert result.exit_code in (0, 1)


@pytest.fixture
def packages(monkeypatch):
    """Pretend that these packages provide ONNX Runtime."""

    def pretend(**versions: str) -> None:
        found = {name.replace("_", "-"): version for name, version in versions.items()}
        for module in (ort, doctor):
            monkeypatch.setattr(module, "onnxruntime_packages", lambda: found)

    return pretend


def test_two_onnx_runtimes_side_by_side(packages):
    packages(onnxruntime="1.32.0", onnxruntime_gpu="1.31.1")
    finding = report()["ONNX Runtime"]
    assert finding["status"] == "problem"
    assert "onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1" in finding["detail"]
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in finding["detail"]


def test_no_op_library(monkeypatch):
    def absent():
        raise RuntimeSetupError("the op library is not built")

    monkeypatch.setattr(doctor._native, "library", absent)
    assert report()["op library"] == {
        "name": "op library",
        "status": "problem",
        "detail": "the op library is not built",
    }


def test_an_op_library_that_does_not_load(monkeypatch):
    def broken():
        raise OSError("undefined symbol: x")

    monkeypatch.setattr(doctor._native, "library", broken)
    finding = report()["op library"]
    assert finding["status"] == "problem"
    assert "undefined symbol: x" in finding["detail"]


@pytest.mark.parametrize(
    ("provider", "status"), [("CPUExecutionProvider", "absent"), ("CUDAExecutionProvider", "problem")]
)
def test_no_device_matters_where_onnx_runtime_is_for_gpus(monkeypatch, provider, status):
    monkeypatch.setattr(doctor, "_providers", lambda: [provider])
    monkeypatch.setattr(cuda, "device_count", lambda: 0)
    assert report()["GPU"]["status"] == status


def test_a_driver_that_fails(monkeypatch):
    def fails():
        raise UnsupportedError("cuInit failed: CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(cuda, "device_count", fails)
    assert "CUDA_ERROR_UNKNOWN" in report()["GPU"]["detail"]


def test_a_device(monkeypatch):
    info = cuda.DeviceInfo(0, "Some GPU", 80 << 30, (9, 0), 132, True, 13000)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "device_info", lambda device: info)
    finding = report()["GPU 0"]
    assert finding["status"] == "ok"
    assert finding["detail"] == "Some GPU, sm_90, 80 GiB, driver for CUDA 13.0"
