from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from onnx_kv.errors import ConfigError, DriverError
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout
from onnx_kv.memory import MemoryPool
from onnx_kv.runtime.cache import KvCache
from onnx_kv.runtime.config import GraphMode
from onnx_kv.runtime.graph import PREDICATES, CapturedStep, StepFacts, decline_reason
from onnx_kv.runtime.stats import Stats
from tests.support.caches import qwen05b

FIXED, BUCKET, REALLOC = GrowthPolicy


class FakeGraph:
    def __init__(self, device: FakeDevice, baked: object) -> None:
        self.device, self.baked, self.closed = device, baked, False

    def launch(self, stream: FakeDevice) -> None:
        assert not self.closed, "a graph that was given up is launched"
        self.device.log.append("replay")
        assert self.baked == self.device.bindings(), "a graph runs with bindings that are no longer there"

    def close(self) -> None:
        self.closed = True


class FakeCapture:
    graph: FakeGraph


class FakeDevice:
    """A stream at whose edge captures are recorded; the step it runs reads the cache's bindings."""

    def __init__(self, cache: KvCache | None = None) -> None:
        self.cache = cache
        self.log: list[str] = []
        self.recording = False
        self.fail = 0

    def bindings(self) -> object:
        return self.cache.signature() if self.cache else ()

    def run_step(self) -> None:
        if self.recording and self.fail:
            self.fail -= 1
            raise DriverError("cuMemAlloc: not permitted while a stream is capturing")
        self.log.append("record" if self.recording else "plain")

    @contextmanager
    def capture(self) -> Iterator[FakeCapture]:
        capture, self.recording = FakeCapture(), True
        try:
            yield capture
        finally:
            self.recording = False
        capture.graph = FakeGraph(self, self.bindings())


@pytest.mark.parametrize(
    ("layout", "policy", "min_bucket", "captures", "replays", "invalidations", "keeps"),
    [
        (KvLayout.HEAD_MAJOR, BUCKET, 8, 4, 39, 4, 0),
        (KvLayout.SEQ_MAJOR, FIXED, 8, 1, 45, 1, 3),
        (KvLayout.HEAD_MAJOR, BUCKET, 64, 1, 45, 1, 0),
        (KvLayout.SEQ_MAJOR, FIXED, 64, 1, 45, 1, 0),
        (KvLayout.TOKEN_MAJOR, FIXED, 8, 1, 45, 1, 3),
        (KvLayout.HEAD_MAJOR, REALLOC, 8, 4, 39, 4, 0),
    ],
)
def test_forced_growth_counters(
    layout: KvLayout,
    policy: GrowthPolicy,
    min_bucket: int,
    captures: int,
    replays: int,
    invalidations: int,
    keeps: int,
) -> None:
    """The published table: 48 tokens from a prompt of 5, of which the first comes from the prefill."""
    layers = qwen05b(layout).layers
    cache = KvCache(layers, layout, "float16", 1, 512, policy=policy, min_bucket=min_bucket, pool=MemoryPool())
    device, stats = FakeDevice(cache), Stats()
    step = CapturedStep(device.run_step, device, cache.signature, stats)
    cache.ensure([5])
    for length in range(6, 53):
        event = cache.ensure([length])
        if event is not None:
            step.grew(event)
        step()
    assert (stats.captures, stats.replays, stats.invalidations) == (captures, replays, invalidations)
    assert stats.growth_keeps == keeps
    assert sum(stats.keep_reasons.values()) == keeps
    assert sum(stats.invalidation_reasons.values()) == invalidations
    assert len(device.log) == 47 + captures
    assert stats.decline_reason is None


def test_a_graph_is_given_up_when_bytes_moved_even_to_the_same_addresses() -> None:
    cache = KvCache(
        qwen05b(KvLayout.HEAD_MAJOR).layers, KvLayout.HEAD_MAJOR, "float16", 1, 64, min_bucket=8, pool=MemoryPool()
    )
    device, stats = FakeDevice(), Stats()
    step = CapturedStep(device.run_step, device, lambda: "the same", stats)
    for _ in range(4):
        step()
    assert device.log == ["plain", "plain", "record", "replay", "replay"]
    cache.ensure([8])
    event = cache.ensure([9])
    assert event is not None
    assert event.bytes_moved > 0
    pretended = replace(event, after=event.before)
    assert pretended.kept
    step.grew(pretended)
    assert stats.growth_keeps == 0
    step()
    assert device.log[5:] == ["plain"]
    assert stats.invalidations == 2


def test_a_changed_signature_is_noticed_without_a_growth() -> None:
    device, stats, signature = FakeDevice(), Stats(), ["a"]
    step = CapturedStep(device.run_step, device, lambda: signature[0], stats)
    for name in "aaaabbbb":
        signature[0] = name
        step()
    assert device.log == ["plain", "plain", "record", "replay", "replay"] * 2
    assert stats.invalidation_reasons == {"first_binding": 1, "signature_changed": 1}


def test_an_error_inside_a_capture_runs_the_step_plainly_ever_after() -> None:
    device, stats = FakeDevice(), Stats()
    device.fail = 1
    step = CapturedStep(device.run_step, device, lambda: "same", stats)
    for _ in range(5):
        step()
    assert device.log == ["plain"] * 5
    assert stats.decline_reason == "capture_failed: cuMemAlloc: not permitted while a stream is capturing"
    assert (stats.captures, stats.replays) == (0, 0)
    following = Stats()
    step = CapturedStep(device.run_step, device, lambda: "same", following)
    for _ in range(3):
        step()
    assert following.captures == following.replays == 1


def test_an_error_of_a_plain_step_is_the_callers() -> None:
    def broken() -> None:
        raise DriverError("cuLaunchKernel: an illegal address")

    step = CapturedStep(broken, FakeDevice(), lambda: "same", Stats())
    with pytest.raises(DriverError, match="illegal address"):
        step()


def test_a_declined_step_runs_plainly_and_counts_keeps_alone() -> None:
    cache = KvCache(qwen05b(KvLayout.SEQ_MAJOR).layers, KvLayout.SEQ_MAJOR, "float16", 1, 64, min_bucket=8)
    device, stats = FakeDevice(), Stats()
    step = CapturedStep(device.run_step, None, cache.signature, stats, "policy: graphs are off")
    cache.ensure([5])
    for length in range(6, 40):
        event = cache.ensure([length])
        if event is not None:
            step.grew(event)
        step()
    assert device.log == ["plain"] * 34
    assert (stats.captures, stats.replays, stats.invalidations, stats.growth_keeps) == (0, 0, 0, 3)
    assert stats.decline_reason == "policy: graphs are off"


def test_a_closed_step_releases_its_graph() -> None:
    device = FakeDevice()
    step = CapturedStep(device.run_step, device, lambda: "same", Stats())
    for _ in range(3):
        step()
    graph = step._graph
    assert isinstance(graph, FakeGraph)
    step.close()
    assert graph.closed


GOOD = StepFacts(GraphMode.AUTO, on_cuda=True)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (GOOD, None),
        (replace(GOOD, mode=GraphMode.OFF), "policy: graphs are off"),
        (replace(GOOD, on_cuda=False), "no_cuda_device: the model does not run on a CUDA device"),
        (
            replace(GOOD, foreign_nodes=("a", "b", "c", "d", "e")),
            "unsupported_node: not run by the CUDA provider: a, b, c and 2 more",
        ),
        (
            replace(GOOD, moving_inputs=("attention_mask",)),
            "moving_shape: changes with every step: attention_mask; patch the model with --lift-sequence-lengths",
        ),
        (replace(GOOD, logits_on_device=False), "host_resident_output: the logits go through the host"),
        (replace(GOOD, mode=GraphMode.OFF, on_cuda=False), "policy: graphs are off"),
    ],
)
def test_every_refusal_has_one_named_reason(facts: StepFacts, reason: str | None) -> None:
    assert decline_reason(facts) == reason
    assert reason is None or reason.partition(":")[0] in PREDICATES
    if reason is not None and facts.mode is GraphMode.AUTO:
        with pytest.raises(ConfigError, match="graph=on, but the step cannot be captured"):
            decline_reason(replace(facts, mode=GraphMode.ON))


def test_graphs_on_is_fine_where_they_are_possible() -> None:
    assert decline_reason(replace(GOOD, mode=GraphMode.ON)) is None
