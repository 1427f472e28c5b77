from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

TOOL = Path(__file__).parents[2] / "tools" / "probe_vmm.py"


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probe_vmm", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_host_is_probed(probe: ModuleType) -> None:
    result = CliRunner().invoke(probe.main, ["--device", "cpu", "--granules", "4", "--repeats", "2", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["granule_bytes"] == os.sysconf("SC_PAGESIZE")
    assert found["reserve_limit_bytes"] >= 1 << 40
    assert found["graph_follows_a_remap"] is None
    assert len(found["us_a_granule"]) == 7
    assert all(cost > 0 for cost in found["us_a_granule"].values())


def test_a_table_is_printed(probe: ModuleType) -> None:
    result = CliRunner().invoke(probe.main, ["--device", "cpu", "--granules", "4", "--repeats", "2"])
    assert "map again elsewhere: one range" in result.output
    assert "granule 4,096 bytes" in result.output


def test_an_unknown_device_is_refused(probe: ModuleType) -> None:
    result = CliRunner().invoke(probe.main, ["--device", "tpu"])
    assert result.exit_code == 2
    assert "no device is called 'tpu'" in result.output
