from __future__ import annotations

import os
import subprocess
import sys

import pytest

from onnx_kv.errors import ConfigError
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout
from onnx_kv.runtime.config import Device, GraphMode, RuntimeConfig


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, whose environment has nothing of this one's settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONNX_KV_")}
    code = "import os\nfrom onnx_kv.runtime.config import RuntimeConfig\n" + code
    return subprocess.run([sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True)


def test_defaults() -> None:
    config = RuntimeConfig.resolve()
    assert config == RuntimeConfig()
    assert config.device == Device("cpu", 0)
    assert config.kv_layout is None


def test_arguments() -> None:
    config = RuntimeConfig.resolve(device="cuda:1", kv_layout="seq-major", growth="realloc", graph="off", budget=2**30)
    assert (config.device.kind, config.device.index) == ("cuda", 1)
    assert str(config.device) == "cuda:1"
    assert config.kv_layout is KvLayout.SEQ_MAJOR
    assert config.growth is GrowthPolicy.REALLOC
    assert config.graph is GraphMode.OFF
    assert config.budget is not None
    assert config.budget.limit == 2**30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "gpu"}, "device='gpu'.*cuda:N"),
        ({"device": "cpu:1"}, "cpu:1"),
        ({"kv_layout": "sideways"}, "seq-major"),
        ({"growth": "fast"}, "growth='fast'"),
        ({"min_bucket": 0}, "min_bucket=0: must be at least 1"),
        ({"max_length": -1}, "max_length=-1"),
        ({"budget": "many"}, "budget='many'"),
        ({"threads": True}, "threads=True: not an integer"),
        ({"trim_after_turn": "yes"}, "trim_after_turn='yes': neither on nor off"),
        ({"colour": 1}, "no setting is called colour"),
    ],
)
def test_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig.resolve(**arguments)


def test_an_argument_wins_over_its_variable() -> None:
    code = "c = RuntimeConfig.resolve(min_bucket=8); print(c.min_bucket, c.max_length, c.kv_layout.cli_name)"
    done = run(code, ONNX_KV_MIN_BUCKET="16", ONNX_KV_MAX_LENGTH="99", ONNX_KV_LAYOUT="token-major")
    assert done.stdout.split() == ["8", "99", "token-major"], done.stderr


@pytest.mark.parametrize("text", ["on", "off"])
def test_a_switch(text: str) -> None:
    done = run("print(RuntimeConfig.resolve().trim_after_turn)", ONNX_KV_TRIM_AFTER_TURN=text)
    assert done.stdout.split() == [str(text == "on")], done.stderr


def test_a_variable_that_changed_is_an_error() -> None:
    code = "RuntimeConfig.resolve(); os.environ['ONNX_KV_MIN_BUCKET'] = '32'; RuntimeConfig.resolve()"
    done = run(code, ONNX_KV_MIN_BUCKET="16")
    assert "ConfigError: ONNX_KV_MIN_BUCKET changed" in done.stderr


def test_a_variable_is_named_where_its_value_is_wrong() -> None:
    done = run("RuntimeConfig.resolve()", ONNX_KV_GRAPH="maybe")
    assert "ConfigError: ONNX_KV_GRAPH='maybe'" in done.stderr
