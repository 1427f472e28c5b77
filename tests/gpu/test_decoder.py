"""The decoder on a GPU: its engine against the host's, captured steps against plain ones, rows that end early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_kv.errors import ModelOutputError, OutOfMemoryError
from onnx_kv.layout import KvLayout
from onnx_kv.parity.growth import reproduce_growth
from onnx_kv.runtime.decoder import Decoder
from onnx_kv.runtime.rows import FinishReason
from onnx_kv.runtime.sampling import Sampling
from tests.conftest import Patched
from tests.support.stock import MODELS
from tests.support.weights import with_weights

pytestmark = pytest.mark.gpu

NAME = "llama-fp16"
LAYOUTS = [layout.cli_name for layout in KvLayout]


def prompt(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(3, 256, length)]


def tokens(decoder: Decoder, prompts: Any, count: int = 40, **options: Any) -> list[list[int]]:
    return [row.tokens for row in decoder.generate(prompts, max_new_tokens=count, **({"stop_tokens": ()} | options))]


@pytest.fixture(scope="module")
def lifted(patched: Patched) -> Path:
    return patched(NAME, "seq-major", lift_sequence_lengths=True, last_token_logits=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lift", [False, True])
def test_agrees_with_the_host(layout: str, lift: bool, patched: Patched) -> None:
    directory = patched(NAME, layout, lift_sequence_lengths=lift or None)
    host, device = Decoder(directory, min_bucket=32), Decoder(directory, device="cuda", min_bucket=32, graph="on")
    for length in (1, 17, 60):
        expected = list(host.stream(prompt(length), max_new_tokens=40, stop_tokens=(), logits=True))
        steps = list(device.stream(prompt(length), max_new_tokens=40, stop_tokens=(), logits=True))
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours.logits is not None
            assert theirs.logits is not None
            difference = np.abs(ours.logits.astype(np.float64) - theirs.logits).max()
            assert difference <= 2e-2 * np.abs(theirs.logits).max()
            if ours.tokens != theirs.tokens:
                second, first = np.sort(theirs.logits[0].astype(np.float64))[-2:]
                assert first - second <= 2 * difference
                break
    assert device.stats.captures > 0


def test_layouts_are_equal_in_every_bit(patched: Patched) -> None:
    runs = []
    for layout in LAYOUTS:
        decoder = Decoder(patched(NAME, layout, lift_sequence_lengths=True), device="cuda", min_bucket=16)
        steps = list(decoder.stream(prompt(30), max_new_tokens=40, stop_tokens=(), logits=True))
        runs.append(
            (b"".join(step.logits.tobytes() for step in steps if step.logits is not None), decoder.read_cache())
        )
    for logits, cache in runs[1:]:
        assert logits == runs[0][0]
        assert all(ours.tobytes() == theirs.tobytes() for ours, theirs in zip(cache, runs[0][1], strict=True))


@pytest.mark.parametrize("lift", [False, True])
def test_a_captured_step_chooses_what_a_plain_one_does(lift: bool, patched: Patched) -> None:
    directory = patched(NAME, "head-major", lift_sequence_lengths=lift or None)
    captured = Decoder(directory, device="cuda", graph="on", min_bucket=16)
    plain = Decoder(directory, device="cuda", graph="off", min_bucket=16)
    batch = [prompt(5), prompt(30), prompt(1)]
    assert tokens(captured, batch, 80) == tokens(plain, batch, 80)
    assert captured.stats.replays > 50
    assert captured.stats.captures > 1
    assert plain.stats.replays == 0
    assert plain.stats.decline_reason == "policy: graphs are off"


def test_a_second_generation_replays_the_first_ones_graph(lifted: Path) -> None:
    decoder = Decoder(lifted, device="cuda", graph="on")
    first = tokens(decoder, prompt(9))
    assert tokens(decoder, prompt(9)) == first
    assert decoder.stats.captures == 1


def test_rows_that_end_early_stay_as_they_are(lifted: Path) -> None:
    decoder = Decoder(lifted, device="cuda", max_length=64)
    batch = [prompt(20), prompt(9), prompt(3)]
    free = tokens(decoder, batch, 44)
    stop = free[2][7]
    ended = decoder.generate(batch, max_new_tokens=44, stop_tokens=[stop])
    for row, everything in zip(ended, free, strict=True):
        end = everything.index(stop) + 1 if stop in everything else 44
        assert row.tokens == everything[:end]
    assert ended[2].finish is FinishReason.STOP
    assert decoder.tokens[2][-1] == stop
    # What the cache holds of an ended row is what it said, so it can be gone on with.
    decoder.rewind(12)
    whole = decoder.tokens
    assert tokens(decoder, None, 10) == tokens(Decoder(lifted, device="cuda", max_length=64), whole, 10)


def test_a_row_may_reach_the_maximum_before_the_others(lifted: Path) -> None:
    decoder = Decoder(lifted, device="cuda", max_length=48)
    batch = [prompt(40), prompt(10)]
    together = decoder.generate(batch, stop_tokens=())
    assert [len(row.tokens) for row in together] == [8, 38]
    assert all(row.finish is FinishReason.MAX_LENGTH for row in together)
    alone = Decoder(lifted, device="cuda", max_length=48)
    assert [alone.generate(row, stop_tokens=())[0].tokens for row in batch] == [row.tokens for row in together]


def test_turns_and_rewinds(lifted: Path) -> None:
    decoder, fresh = Decoder(lifted, device="cuda"), Decoder(lifted, device="cuda")
    [said] = tokens(decoder, prompt(20), 30)
    decoder.rewind(35)
    assert tokens(decoder, None, 15) == [said[15:]]
    decoder.append([7, 8, 9])
    assert tokens(decoder, None, 12) == tokens(fresh, prompt(20) + said + [7, 8, 9], 12)
    stream = decoder.stream(prompt(20), max_new_tokens=30, stop_tokens=())
    head = [next(stream).tokens[0] for _ in range(10)]
    del stream
    assert head + tokens(decoder, None, 20)[0] == said


def test_a_seed_gives_the_same_tokens(lifted: Path) -> None:
    decoder = Decoder(lifted, device="cuda")
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=11)
    first = tokens(decoder, prompt(9), sampling=sampling)
    assert tokens(decoder, prompt(9), sampling=sampling) == first
    assert tokens(decoder, prompt(9), sampling=Sampling(1.0, 50, 0.95, 12)) != first
    assert tokens(decoder, prompt(9)) == tokens(Decoder(lifted, device="cuda"), prompt(9))


def test_tokens_come_out_before_a_refused_growth(lifted: Path) -> None:
    free = Decoder(lifted, device="cuda", growth="realloc", min_bucket=32)
    [everything] = tokens(free, prompt(20), 40)
    used = Decoder(lifted, device="cuda", growth="realloc", min_bucket=32)
    used.generate(prompt(20), max_new_tokens=2)
    decoder = Decoder(
        lifted, device="cuda", growth="realloc", min_bucket=32, budget=used.stats.physical_kv_bytes * 5 // 2
    )
    with pytest.raises(OutOfMemoryError, match="budget"):
        decoder.generate(prompt(20), max_new_tokens=40, stop_tokens=())
    said = decoder.tokens[0][20:]
    assert said == everything[:13], (
        "20 tokens and 12 more fill the bucket of 32; the thirteenth comes from its last step"
    )
    decoder.rewind(22)
    assert tokens(decoder, None, 10) == [everything[2:12]]


def test_logits_that_are_not_finite_are_an_error(patched: Patched, tmp_path: Path) -> None:
    directory = patched(NAME, "seq-major", lift_sequence_lengths=True)
    broken = with_weights(directory, tmp_path / "broken", lambda weights: weights * np.float16(np.nan))
    with pytest.raises(ModelOutputError, match="row 0"):
        Decoder(broken, device="cuda").generate(prompt(5), max_new_tokens=4)


@pytest.mark.parametrize("lengths", [(5,), (5, 3, 7)])
def test_every_counter_adds_up(lengths: tuple[int, ...]) -> None:
    report = reproduce_growth(MODELS / NAME, prompt_lengths=lengths, device="cuda")
    assert report.right, report.to_json()
    assert [row.counted["captures"] for row in report.rows[:2]] == [4, 1]
