"""The attention benchmarks: their shapes, bytes and operations on paper, and real measurements of a tiny node."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from onnx_kv.bench.attention import ORT, Case, Shape, cache_bytes, flops, read_bytes
from onnx_kv.cli import main
from onnx_kv.errors import ConfigError


def test_shapes_are_read() -> None:
    assert Shape.parse("32/8/128", 4) == Shape(32, 8, 128, 4)


@pytest.mark.parametrize("text", ["32/8", "32/5/64", "0/1/64", "32/8/0", "a/b/c"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="as in 32/8/128"):
        Shape.parse(text)


def test_bytes_and_operations() -> None:
    shape = Shape(32, 8, 128, 32)
    # Llama-3-8B, fp16: 128 KiB a token over 32 layers, so 4 KiB a layer.
    assert cache_bytes(shape, Case.decode(1024), 2) == 1024 * 128 * 1024
    assert read_bytes(shape, Case.decode(1024), 2) == 1024 * 4096
    # Two products of 2 · S² · D operations for each of 32 heads, half of which causality leaves out.
    assert flops(shape, Case.prefill(512)) == 2 * 2 * 512**2 * 128 * 32 / 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="running a node needs ONNX Runtime")
    from onnx_kv.bench import attention_cpu

    for name, value in {"SAMPLES": 2, "SAMPLE_SECONDS": 0.0, "PAUSE_SECONDS": 0.0, "_COPY_BYTES": 1 << 16}.items():
        monkeypatch.setattr(attention_cpu, name, value)


@pytest.mark.parametrize(
    "case", [Case.decode(33), Case.prefill(20), Case("batch", (9, 24), 1, 32)], ids=lambda c: c.name
)
def test_every_layout_computes_what_onnxruntime_does(quick: None, case: Case) -> None:
    from onnx_kv.bench import attention_cpu

    found = attention_cpu.measure(Shape(6, 2, 16), case, threads=1)  # refuses results that differ
    assert list(found.samples) == [ORT, "head-major", "seq-major", "paired"]
    assert all(len(samples) == 2 for samples in found.samples.values())


@pytest.mark.parametrize("arguments", [["decode", "--contexts", "16,32"], ["prefill", "--lengths", "16,32"]])
def test_command_writes_a_result(quick: None, tmp_path: Path, arguments: list[str]) -> None:
    target = tmp_path / "result.json"
    done = CliRunner().invoke(main, ["bench", *arguments, "--shape", "6/2/16", "--json", str(target)])
    assert done.exit_code == 0, done.output
    result = json.loads(target.read_text())
    kind = arguments[0]
    assert {row["name"] for row in result["rows"]} == {
        f"{kind}-{length} 6/2/16 {name}" for length in (16, 32) for name in (ORT, "head-major", "seq-major", "paired")
    }
    assert float(result["environment"]["copy_bandwidth_gb_s"]) > 0
    assert result["rows"][0]["knobs"]["device"] == "cpu"


class FakeStream:
    """What the CUDA benchmark asks of a stream, without a device."""

    device, handle = 0, 1

    def __init__(self, device: int = 0) -> None:
        self.queued: list[Any] = []

    def synchronize(self) -> None: ...

    def copy(self, *_: Any) -> None: ...

    @contextlib.contextmanager
    def capture(self) -> Iterator[Any]:
        begin = len(self.queued)
        capture = SimpleNamespace()
        yield capture
        capture.graph = SimpleNamespace(launch=lambda stream: None, calls=self.queued[begin:])


class FakeBuffer:
    address = 5 << 20

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.nbytes = nbytes

    def write(self, array: np.ndarray[Any, Any], stream: FakeStream) -> None: ...

    def close(self) -> None: ...


class FakeEvent:
    def __init__(self, device: int = 0) -> None: ...

    def __enter__(self) -> FakeEvent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record(self, stream: FakeStream) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_ms(self, since: FakeEvent) -> float:
        return 4.0


def test_cuda_calls_are_laid_out_by_the_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: which addresses and strides our kernels get, and that rivals that cannot run are named."""
    from onnx_kv.bench import attention_cuda

    fake = SimpleNamespace(
        Stream=FakeStream,
        Buffer=FakeBuffer,
        Event=FakeEvent,
        CopyKind=SimpleNamespace(DEVICE_TO_DEVICE=2),
        copy_to_device=lambda array, stream: FakeBuffer(array.nbytes),
    )
    launched: list[Any] = []
    monkeypatch.setattr(attention_cuda, "cuda", fake)
    monkeypatch.setattr(attention_cuda, "launch", lambda params, stream: launched.append(params))
    case = Case("decode", (700, 700), 1, 1024)
    found = attention_cuda.measure(Shape(4, 2, 64, 3), case)
    assert list(found.samples) == ["head-major", "seq-major", "paired", "token-major"]
    assert set(found.missing) == {ORT, "sdpa"}
    # A sample of 8 ms is two launches of 4 ms, which the fake event shows for both together; 3 layers each.
    assert found.samples["paired"] == [pytest.approx(2000 / 3)] * attention_cuda.SAMPLES
    side = 2 * 1024 * 2 * 64 * 2  # rows · slots · heads · size · bytes
    offsets = {}
    for layout, first in (("head-major", 0), ("seq-major", 9), ("paired", 18), ("token-major", 27)):
        calls = launched[first : first + 3]  # the first of two warm-up rounds and the capture
        base = calls[0].past_key
        offsets[layout] = [(call.past_key - base, call.past_value - base) for call in calls]
    assert offsets["head-major"] == offsets["seq-major"] == [(2 * i * side, (2 * i + 1) * side) for i in range(3)]
    assert offsets["paired"] == [(2 * i * side, 2 * i * side + 256) for i in range(3)]
    assert offsets["token-major"] == [(512 * i, 512 * i + 256) for i in range(3)]
