"""The CUDA engine's logic on a simulated device, against the host's engine; tests/gpu has it on a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnx_kv.errors import OutOfMemoryError
from onnx_kv.layout import KvLayout
from onnx_kv.runtime.decoder import Decoder
from onnx_kv.runtime.rows import FinishReason
from onnx_kv.runtime.sampling import Sampling
from tests.conftest import Patched
from tests.support.simulated_cuda import simulated

__all__ = ["simulated"]

Simulated = Callable[..., Decoder]
NAME = "qwen2-tiny"


def prompt(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(3, 256, length)]


def tokens(decoder: Decoder, prompts: Any, count: int = 40, **options: Any) -> list[list[int]]:
    return [row.tokens for row in decoder.generate(prompts, max_new_tokens=count, **({"stop_tokens": ()} | options))]


@pytest.mark.parametrize("lift", [False, True])
@pytest.mark.parametrize("layout", [KvLayout.HEAD_MAJOR, KvLayout.TOKEN_MAJOR])
def test_generates_what_the_host_does(layout: KvLayout, lift: bool, patched: Patched, simulated: Simulated) -> None:
    directory = patched(NAME, layout.cli_name, lift_sequence_lengths=lift or None)
    batch = [prompt(5), prompt(20), prompt(1)]
    device, host = simulated(directory, min_bucket=16, graph="on"), Decoder(directory, min_bucket=16)
    assert tokens(device, batch, 80) == tokens(host, batch, 80)
    stats = device.stats
    grown = layout is KvLayout.HEAD_MAJOR
    assert stats.decode_steps == 79
    assert stats.growth_events == 2
    assert stats.growth_keeps == (0 if grown else 2)
    assert stats.captures == stats.invalidations == (3 if grown else 1)
    assert stats.replays == 79 - 2 * stats.captures
    assert stats.decline_reason is None


def test_logits_of_every_step(patched: Patched, simulated: Simulated) -> None:
    directory = patched(NAME, "seq-major")
    ours = list(simulated(directory).stream(prompt(9), max_new_tokens=12, stop_tokens=(), logits=True))
    theirs = list(Decoder(directory).stream(prompt(9), max_new_tokens=12, stop_tokens=(), logits=True))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tokens == other.tokens
        assert mine.logits is not None
        assert other.logits is not None
        assert np.abs(mine.logits - other.logits).max() < 1e-4


@pytest.mark.parametrize("lift", [False, True])
def test_rows_that_end_early_stay_as_they_are(lift: bool, patched: Patched, simulated: Simulated) -> None:
    directory = patched(NAME, "head-major", lift_sequence_lengths=lift or None)
    batch = [prompt(20), prompt(9), prompt(3)]
    free = tokens(Decoder(directory), batch, 44)
    stop = free[2][7]
    device, host = simulated(directory, max_length=96, min_bucket=16), Decoder(directory, max_length=96)
    ended = device.generate(batch, max_new_tokens=44, stop_tokens=[stop])
    assert ended == host.generate(batch, max_new_tokens=44, stop_tokens=[stop])
    assert ended[2].finish is FinishReason.STOP
    for ours, theirs in zip(device.read_cache(2), host.read_cache(2), strict=True):
        both = min(ours.shape[1], theirs.shape[1])
        assert np.abs(ours[:, :both] - theirs[:, :both]).max() < 1e-4
    for decoder in (device, host):
        decoder.append([[7], [8], [9, 10]])
    assert tokens(device, None, 5) == tokens(host, None, 5)


def test_a_row_may_reach_the_maximum_before_the_others(patched: Patched, simulated: Simulated) -> None:
    directory = patched(NAME, "seq-major", lift_sequence_lengths=True)
    device, host = simulated(directory, max_length=48), Decoder(directory, max_length=48)
    batch = [prompt(40), prompt(10)]
    assert device.generate(batch, stop_tokens=()) == host.generate(batch, stop_tokens=())


def test_turns_rewinds_and_streams_that_are_left(patched: Patched, simulated: Simulated) -> None:
    directory = patched(NAME, "seq-major", lift_sequence_lengths=True)
    decoder = simulated(directory)
    [said] = tokens(decoder, prompt(20), 30)
    decoder.rewind(35)
    assert tokens(decoder, None, 15) == [said[15:]]
    decoder.append([7, 8, 9])
    assert tokens(decoder, None, 12) == tokens(Decoder(directory), [*prompt(20), *said, 7, 8, 9], 12)
    stream = decoder.stream(prompt(20), max_new_tokens=30, stop_tokens=())
    head = [next(stream).tokens[0] for _ in range(10)]
    del stream
    assert head + tokens(decoder, None, 20)[0] == said
    assert decoder.stats.captures == 1, "the same buffers in every generation"


def test_another_way_to_choose_is_another_graph(patched: Patched, simulated: Simulated) -> None:
    directory = patched(NAME, "seq-major", lift_sequence_lengths=True)
    device, host = simulated(directory), Decoder(directory)
    sampling = Sampling(temperature=1.0, top_k=50, seed=11)
    assert tokens(device, prompt(9)) == tokens(host, prompt(9))
    assert tokens(device, prompt(9), sampling=sampling) == tokens(host, prompt(9), sampling=sampling)
    assert device.stats.captures == 2


def test_tokens_come_out_before_a_refused_growth(patched: Patched, simulated: Simulated) -> None:
    directory = patched(NAME, "seq-major", lift_sequence_lengths=True)
    settings = {"growth": "realloc", "min_bucket": 32}
    free = simulated(directory, **settings)
    [everything] = tokens(free, prompt(20), 10)
    budget = free.stats.physical_kv_bytes * 5 // 2
    [everything] = tokens(free, prompt(20), 40)
    decoder = simulated(directory, budget=budget, **settings)
    with pytest.raises(OutOfMemoryError, match="budget"):
        decoder.generate(prompt(20), max_new_tokens=40, stop_tokens=())
    assert decoder.tokens[0][20:] == everything[:13], "the thirteenth comes from the last step in the bucket of 32"
    decoder.rewind(22)
    assert tokens(decoder, None, 10) == [everything[2:12]]


def test_rows_start_from_a_shared_prefix(patched: Patched, simulated: Simulated) -> None:
    directory = patched("qwen2-tiny", KvLayout.TOKEN_MAJOR.cli_name, lift_sequence_lengths=True)
    settings = {"growth": "fixed-stride", "graph": "on"}
    device, host = simulated(directory, **settings), Decoder(directory, growth="fixed-stride")
    device.share_prefix(prompt(128))
    prompts = [[*prompt(128), 7, 8, 9], [*prompt(128), 100], prompt(5)]
    for _ in range(2):
        expected = host.generate(prompts, max_new_tokens=20, stop_tokens=())
        assert device.generate(prompts, max_new_tokens=20, stop_tokens=()) == expected
    assert device.stats.shared_starts == 4
    assert device.stats.captures == 1


def test_a_captured_graph_stays_through_a_trim(patched: Patched, simulated: Simulated) -> None:
    directory = patched(NAME, "seq-major", lift_sequence_lengths=True)
    device, host = simulated(directory, graph="on", trim_after_turn=True, min_bucket=16), Decoder(directory)
    assert tokens(device, prompt(20), 200) == tokens(host, prompt(20), 200)
    held = device.stats.physical_kv_bytes
    device.rewind(30)
    assert device.trim() == held - device.stats.physical_kv_bytes > 0
    host.rewind(30)
    assert tokens(device, None, 40) == tokens(host, None, 40)
    assert device.stats.captures == 1
