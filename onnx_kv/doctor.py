"""What this machine can do: which of the parts that onnx_kv needs are here, fit together, and load.

Every check runs whatever the others found. A part that is only needed for GPUs is a problem only where the installed
ONNX Runtime is one for GPUs.
"""

from __future__ import annotations

import enum
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx_kv
from onnx_kv import _native, cuda
from onnx_kv.errors import OnnxKvError, RuntimeSetupError
from onnx_kv.ops import library_path
from onnx_kv.runtime.ort import onnxruntime_packages, require_onnxruntime

_CUDA_PROVIDER = "CUDAExecutionProvider"


class Status(enum.StrEnum):
    """What a check found: `ok`, `absent` where the part is not needed here, `problem` where one has to do something."""

    OK = "ok"
    ABSENT = "absent"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One part of the machine; `detail` says what was found, and for a problem what to do."""

    name: str
    status: Status
    detail: str


def examine() -> list[Finding]:
    """Run every check."""
    gpu_wanted = _CUDA_PROVIDER in _providers()
    findings = [_here()]
    for name, check in (
        ("ONNX Runtime", _onnxruntime),
        ("op library", _op_library),
        ("op library in ONNX Runtime", _registered),
    ):
        findings.append(_run(name, check))
    findings += _devices(gpu_wanted)
    findings.append(_nvrtc(gpu_wanted))
    return findings


def _here() -> Finding:
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".strip(", ")
    return Finding("onnx_kv", Status.OK, f"{onnx_kv.__version__}, Python {platform.python_version()}, {system}")


def _run(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, Status.OK, check())
    except OnnxKvError as error:
        return Finding(name, Status.PROBLEM, str(error))


def _onnxruntime() -> str:
    require_onnxruntime()
    packages = ", ".join(f"{name} {version}" for name, version in onnxruntime_packages().items())
    return f"{packages or 'not from a package'}; providers: {', '.join(_providers())}"


def _op_library() -> str:
    try:
        _native.library()
    except OSError as error:
        raise RuntimeSetupError(f"{library_path()} does not load: {error}; install the package again") from error
    return str(library_path())


def _registered() -> str:
    ort = require_onnxruntime()
    try:
        ort.SessionOptions().register_custom_ops_library(str(library_path()))
    except Exception as error:  # ONNX Runtime raises its own kinds
        raise RuntimeSetupError(f"ONNX Runtime {ort.__version__} refuses the op library: {error}") from error
    return f"accepted by ONNX Runtime {ort.__version__}"


def _devices(wanted: bool) -> Iterator[Finding]:
    missing = Status.PROBLEM if wanted else Status.ABSENT
    try:
        count = cuda.device_count()
        for device in range(count):
            info = cuda.device_info(device)
            major, minor = info.compute_capability
            yield Finding(
                f"GPU {device}",
                Status.OK if info.virtual_memory else Status.PROBLEM,
                f"{info.name}, sm_{major}{minor}, {info.total_bytes / 2**30:.0f} GiB, driver for CUDA "
                f"{info.driver_version // 1000}.{info.driver_version % 1000 // 10}"
                + (
                    ""
                    if info.virtual_memory
                    else "; it has no virtual memory management, which the growing cache needs"
                ),
            )
        if not count:
            advice = "; install an NVIDIA driver, or the package onnxruntime for the CPU" if wanted else ""
            yield Finding("GPU", missing, f"no NVIDIA driver or device{advice}")
    except (OnnxKvError, OSError) as error:
        yield Finding("GPU", missing, str(error))


def _nvrtc(wanted: bool) -> Finding:
    """CUDA kernels are compiled on the machine where they run; CUDA's compiler comes as a package."""
    packages = {
        f"{distribution.name} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if distribution.name and distribution.name.lower().replace("_", "-").startswith("nvidia-cuda-nvrtc")
    }
    if packages:
        return Finding("NVRTC", Status.OK, ", ".join(sorted(packages)))
    advice = "; pip install nvidia-cuda-nvrtc" if wanted else ""
    return Finding("NVRTC", Status.PROBLEM if wanted else Status.ABSENT, f"no package of CUDA's compiler{advice}")


def _providers() -> list[str]:
    try:
        providers: list[str] = require_onnxruntime().get_available_providers()
    except RuntimeSetupError:
        return []
    return providers
