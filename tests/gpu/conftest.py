from __future__ import annotations

import pytest

from onnx_kv import cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder's tests, saying so, on a machine without a CUDA device."""
    if cuda.device_count() > 0:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture
def stream() -> cuda.Stream:
    """A fresh stream of device 0."""
    return cuda.Stream()
