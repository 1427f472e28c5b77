"""Fixtures that several suites share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from onnx_kv.patching import patch_model
from tests.support.stock import MODELS

Patched = Callable[..., Path]

# No example is judged by the clock, and everyone runs the same ones: a failure belongs to the change that shows it.
settings.register_profile("onnx_kv", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("onnx_kv")


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Patched:
    """`patched(name, layout, **passes)`: a shipped model patched so, made once."""
    made: dict[tuple[object, ...], Path] = {}

    def patch(name: str, layout: str, **passes: bool) -> Path:
        key = (name, layout, *sorted(passes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("patched") / f"{name}-{layout}"
            patch_model(MODELS / name, made[key], layout, link=False, **passes)
        return made[key]

    return patch
