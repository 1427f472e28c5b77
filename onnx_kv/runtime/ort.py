"""Which ONNX Runtime is installed, and whether it can be used.

Several packages on PyPI (`onnxruntime`, `onnxruntime-gpu`, …) install the same module; two of them overwrite each
other's files, so exactly one may be there in one environment. Patching and metadata need none.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import re
from pathlib import Path
from types import ModuleType

from onnx_kv.errors import RuntimeSetupError

MODULE = "onnxruntime"

OLDEST = (1, 23)
"""The oldest ONNX Runtime whose custom operators the op library can be."""

INSTALL = "pip install onnxruntime (for NVIDIA GPUs: 'onnxruntime-gpu[cuda,cudnn]')"


def require_onnxruntime() -> ModuleType:
    """Return the `onnxruntime` module, imported.

    Raises:
        RuntimeSetupError: no package provides it, several do, it does not load, or it is older than `OLDEST`; names the
            packages and the command that helps.
    """
    packages = onnxruntime_packages()
    if len(packages) > 1:
        names = " and ".join(f"{name} {version}" for name, version in packages.items())
        raise RuntimeSetupError(
            f"{names} are installed side by side and overwrite each other's files; keep one: "
            f"pip uninstall -y {' '.join(packages)} && {INSTALL}"
        )
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name != MODULE:
            raise RuntimeSetupError(f"ONNX Runtime does not load: {error}") from error
        raise RuntimeSetupError(f"no ONNX Runtime is installed: {INSTALL}") from error
    except ImportError as error:
        raise RuntimeSetupError(f"ONNX Runtime does not load: {error}") from error
    # What a package leaves behind when another one of them was uninstalled is a folder, not a module.
    version = getattr(module, "__version__", None)
    if version is None:
        raise RuntimeSetupError(f"the module {MODULE} is an empty shell; reinstall: {INSTALL}")
    if _numbers(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RuntimeSetupError(
            f"ONNX Runtime {version} is too old; the op library needs {oldest}: "
            f"pip install --upgrade '{next(iter(packages), MODULE)}>={oldest}'"
        )
    return module


def onnxruntime_packages() -> dict[str, str]:
    """The packages that provide the module which Python would import, with their versions.

    A package in a folder that comes later on Python's path is hidden, not overwritten, and does not count.
    """
    names = importlib.metadata.packages_distributions().get(MODULE, [])
    packages = [importlib.metadata.distribution(name) for name in sorted(set(names))]
    found = importlib.machinery.PathFinder.find_spec(MODULE)
    folders = [Path(folder) for folder in (found and found.submodule_search_locations) or ()]
    seen = [package for package in packages if not folders or Path(str(package.locate_file(MODULE))) in folders]
    return {package.name: package.version for package in seen or packages}


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of a version such as `1.24.0.dev20260101`."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
