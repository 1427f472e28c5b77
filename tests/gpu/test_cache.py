"""The growing cache on a device, and its decode step as a real captured graph."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from onnx_kv import cuda
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout, LayerShape
from onnx_kv.memory import MemoryBudget, MemoryPool
from onnx_kv.runtime.binding import Binding
from onnx_kv.runtime.cache import KvCache
from onnx_kv.runtime.cache_file import load_cache, save_cache
from onnx_kv.runtime.graph import CapturedStep
from onnx_kv.runtime.stats import Stats
from tests.support.caches import Shadow, element_strides, qwen05b

pytestmark = pytest.mark.gpu

FIXED, BUCKET, REALLOC = GrowthPolicy
EVERY = list(itertools.product(KvLayout, GrowthPolicy))
# Wide enough that a growth crosses granules: 100 tokens of a row take 0.8 MiB in the first layer.
LAYERS = (LayerShape(2, 2048), LayerShape(1, 1024), LayerShape(3, 512))


class DeviceShadow(Shadow):
    """Writes tokens by copies from the host, queued on the cache's stream."""

    def __init__(self, cache: KvCache, stream: cuda.Stream, seed: int) -> None:
        super().__init__(cache, seed)
        self.stream = stream

    def put(self, binding: Binding, row: int, start: int, part: npt.NDArray[Any]) -> None:
        batch, head, seq, _ = (stride * self.cache.dtype.itemsize for stride in element_strides(self.cache, binding))
        heads, tokens, dim = part.shape
        packed = np.ascontiguousarray(part)
        width = dim * packed.itemsize
        target = binding.address + row * batch + start * seq
        copies = [
            cuda.PitchedCopy(target + h * head, seq, packed.ctypes.data + h * tokens * width, width, width, tokens)
            for h in range(heads)
        ]
        self.stream.copy_pitched(copies, cuda.CopyKind.HOST_TO_DEVICE)


@pytest.mark.parametrize(("layout", "policy"), EVERY)
def test_random_steps_against_a_shadow(layout: KvLayout, policy: GrowthPolicy, stream: cuda.Stream) -> None:
    """840 steps for each of twelve pairs: 10,080 appends, rewinds, resets and trims, rows of different lengths."""
    options: dict[str, Any] = {"min_bucket": 4, "commit_ahead": 8, "device": "cuda", "stream": stream}
    cache = KvCache(LAYERS, layout, "float16", 3, 100, policy=policy, pool=MemoryPool("cuda"), **options)
    shadow = DeviceShadow(cache, stream, seed=layout)
    rng = shadow.rng
    for step in range(840):
        lengths = shadow.lengths
        action = rng.choice(["token", "chunk", "rewind", "reset", "trim"], p=[0.72, 0.08, 0.15, 0.03, 0.02])
        if action == "token" and max(lengths) < 100:
            shadow.append([length + 1 for length in lengths])
        elif action == "chunk":
            shadow.append([int(rng.integers(length, min(100, length + 20) + 1)) for length in lengths])
        elif action == "rewind":
            shadow.rewind([int(rng.integers(0, length + 1)) for length in lengths])
        elif action == "reset":
            shadow.rewind([0] * 3)
        elif action == "trim":
            cache.trim()
        if step % 64 == 0:
            shadow.check()
    shadow.check()
    cache.close()


@pytest.mark.parametrize(("layout", "granules"), [(KvLayout.HEAD_MAJOR, 96), (KvLayout.TOKEN_MAJOR, 1)])
def test_a_short_prefix_commits_the_floor_of_its_layout(layout: KvLayout, granules: int, stream: cuda.Stream) -> None:
    pool = MemoryPool("cuda")
    layers = qwen05b(layout).layers
    options: dict[str, Any] = {"device": "cuda", "stream": stream, "min_bucket": 8, "commit_ahead": 0, "pool": pool}
    with KvCache(layers, layout, "float16", 1, 32_768, policy=FIXED, **options) as cache:
        cache.ensure([5])
        assert cache.physical_bytes == granules * pool.granule


def test_fifty_caches_leave_the_device_as_it_was(stream: cuda.Stream) -> None:
    pool, budget = MemoryPool("cuda"), MemoryBudget(1 << 40)
    stream.synchronize()
    free = cuda.memory_info()[0]
    for number in range(50):
        layout, policy = EVERY[number % len(EVERY)]
        cache = KvCache(
            LAYERS, layout, "float16", 2, 4096, policy=policy, pool=pool, budget=budget, device="cuda", stream=stream
        )
        cache.ensure([600, 2])
        if number % 2:
            cache.close()
        del cache
    gc.collect()
    pool.trim()
    assert budget.held == pool.counters().physical_bytes == pool.counters().reserved_bytes == 0
    assert free - cuda.memory_info()[0] <= pool.granule


@pytest.mark.parametrize("layout", KvLayout)
def test_a_cache_moves_between_devices_by_file(layout: KvLayout, stream: cuda.Stream, tmp_path: Path) -> None:
    host = Shadow(KvCache(LAYERS, KvLayout.SEQ_MAJOR, "float16", 2, 100), seed=1)
    host.append([60, 7])
    save_cache(host.cache, tmp_path / "cache", "m")
    cache = KvCache(LAYERS, layout, "float16", 2, 100, device="cuda", stream=stream)
    load_cache(cache, tmp_path / "cache", "m")
    device = DeviceShadow(cache, stream, seed=2)
    device.values, device.lengths = host.values, host.lengths
    device.append([70, 70])
    device.check()


@pytest.mark.parametrize(
    ("layout", "policy", "captures", "replays", "keeps"),
    [
        (KvLayout.HEAD_MAJOR, BUCKET, 4, 39, 0),
        (KvLayout.SEQ_MAJOR, FIXED, 1, 45, 3),
        (KvLayout.TOKEN_MAJOR, FIXED, 1, 45, 3),
        (KvLayout.HEAD_MAJOR, REALLOC, 4, 39, 0),
    ],
)
def test_a_captured_step_over_a_growing_cache(
    layout: KvLayout, policy: GrowthPolicy, captures: int, replays: int, keeps: int, stream: cuda.Stream
) -> None:
    """The step copies a binding's first token out; whatever grew or moved, it finds the token that is there."""
    layers = qwen05b(layout).layers
    cache = KvCache(
        layers, layout, "float16", 1, 512, policy=policy, min_bucket=8, device="cuda", stream=stream,
        pool=MemoryPool("cuda"),
    )  # fmt: skip
    shadow, stats = DeviceShadow(cache, stream, seed=4), Stats()
    with cuda.Buffer(128) as target:

        def run_step() -> None:
            # The second head's stripe is the one that a bucket in place moves.
            binding = cache.bindings()[0]
            source = binding.address + element_strides(cache, binding)[1] * 2
            stream.copy(target.address, source, 128, cuda.CopyKind.DEVICE_TO_DEVICE)

        step = CapturedStep(run_step, stream, cache.signature, stats)
        shadow.append([5])
        for length in range(6, 53):
            event = cache.ensure([length])
            if event is not None:
                step.grew(event)
            shadow.write_new([length])
            stream.fill(target.address, 0, 128)
            step()
            found = cuda.copy_to_host(target, np.uint16, (64,), stream)
            np.testing.assert_array_equal(found, shadow.values[0][0][0, 1, 0])
        step.close()
    assert stats.decline_reason is None
    assert (stats.captures, stats.replays, stats.growth_keeps) == (captures, replays, keeps)
    assert cache.counters.bytes_moved == (0 if policy is FIXED else 688_128)


def test_a_step_that_cannot_be_captured_runs_plainly_and_says_why(stream: cuda.Stream) -> None:
    stats, runs = Stats(), 0

    def run_step() -> None:
        nonlocal runs
        runs += 1
        stream.synchronize()  # not permitted while capturing

    step = CapturedStep(run_step, stream, lambda: "same", stats)
    for _ in range(5):
        step()
    assert runs == 6
    assert stats.captures == 0
    assert stats.decline_reason is not None
    assert stats.decline_reason.startswith("capture_failed: cuStreamSynchronize")
    with cuda.copy_to_device(np.zeros(4, np.uint8), stream) as buffer, stream.capture() as capture:
        stream.fill(buffer.address, 1, 4)
    assert capture.graph.nodes == 1
