"""Which ONNX Runtime is accepted, with pretended installations."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from onnx_kv.errors import RuntimeSetupError
from onnx_kv.runtime import ort


def site(folder: Path, packages: dict[str, str]) -> str:
    """Lay packages that provide the module out in a folder, as pip does; the folder's path."""
    (folder / "onnxruntime").mkdir(parents=True)
    (folder / "onnxruntime" / "__init__.py").touch()
    for name, version in packages.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("onnxruntime/__init__.py,,\n")
    return str(folder)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Install packages, and pretend that importing the module gives a version, a bare folder or an error."""

    def pretend(packages: dict[str, str], module: str | Exception | None, hidden: dict[str, str] | None = None) -> None:
        ours = [entry for entry in sys.path if "-packages" not in entry]
        later = [site(tmp_path / "later", hidden)] if hidden else []
        monkeypatch.setattr(sys, "path", [site(tmp_path / "first", packages), *later, *ours])

        def load(name: str) -> types.ModuleType:
            assert name == "onnxruntime"
            if isinstance(module, Exception):
                raise module
            made = types.ModuleType(name)
            if module is not None:
                made.__version__ = module  # type: ignore[attr-defined]
            return made

        monkeypatch.setattr(importlib, "import_module", load)

    return pretend


def test_a_package_that_another_folder_hides_does_not_count(installed):
    installed({"onnxruntime-gpu": "1.31.1"}, "1.31.1", hidden={"onnxruntime": "1.30.0"})
    assert ort.onnxruntime_packages() == {"onnxruntime-gpu": "1.31.1"}
    assert ort.require_onnxruntime().__version__ == "1.31.1"


@pytest.mark.parametrize("version", ["1.23.0", "1.32.0", "1.24.0.dev20260101001", "2.0"])
def test_a_new_enough_one(installed, version):
    installed({"onnxruntime": version}, version)
    assert ort.require_onnxruntime().__version__ == version


def test_one_that_no_package_provides_is_taken_as_it_is(installed):
    installed({}, "1.30.0")
    assert ort.require_onnxruntime().__version__ == "1.30.0"


@pytest.mark.parametrize(
    ("packages", "module", "said"),
    [
        ({}, ModuleNotFoundError("No module", name="onnxruntime"), ["pip install onnxruntime", "onnxruntime-gpu"]),
        (
            {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"},
            "1.32.0",
            ["onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1", "pip uninstall -y onnxruntime onnxruntime-gpu"],
        ),
        ({"onnxruntime-gpu": "1.22.1"}, "1.22.1", ["1.22.1", "1.23", "pip install --upgrade 'onnxruntime-gpu>=1.23'"]),
        ({}, None, ["reinstall"]),
        ({"onnxruntime": "1.32.0"}, ImportError("libstdc++.so.6: cannot open"), ["libstdc++.so.6"]),
        ({"onnxruntime": "1.32.0"}, ModuleNotFoundError("No module named 'numpy'", name="numpy"), ["numpy"]),
    ],
    ids=["none", "two", "too old", "a left-over folder", "does not load", "a package is missing"],
)
def test_one_that_cannot_be_used(installed, packages, module, said):
    installed(packages, module)
    with pytest.raises(RuntimeSetupError) as caught:
        ort.require_onnxruntime()
    for words in said:
        assert words in str(caught.value)


def test_the_one_that_is_installed():
    pytest.importorskip("onnxruntime", reason="no ONNX Runtime is installed")
    assert len(ort.onnxruntime_packages()) <= 1
    assert ort.require_onnxruntime().__name__ == "onnxruntime"
