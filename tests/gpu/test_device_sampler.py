"""The step kernel on a GPU, against numpy on the same logits."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_kv import cuda
from onnx_kv.runtime.device_sampler import DeviceSampler
from onnx_kv.runtime.sampling import GREEDY, Sampling

pytestmark = pytest.mark.gpu


def draw(sampling: Sampling, logits: np.ndarray, stream: cuda.Stream, steps: int = 1) -> np.ndarray:
    rows, vocab = logits.shape
    sampler = DeviceSampler(sampling, rows, vocab, str(logits.dtype), stream, ring=steps)
    sampler.start([0] * rows, [0] * rows)
    on_device = cuda.copy_to_device(logits, stream)
    for _ in range(steps):
        sampler.choose(on_device.address, vocab)
    tokens = sampler.chosen(0, steps)
    sampler.close()
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 32000, 151_936])
def test_greedy_is_argmax(stream: cuda.Stream, dtype: str, vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(0, 4, (3, vocab)).astype(dtype)
    assert draw(GREEDY, logits, stream)[:, 0].tolist() == logits.argmax(axis=1).tolist()


def test_lowest_index_wins_ties(stream: cuda.Stream) -> None:
    logits = np.zeros((1, 50_000), np.float16)
    logits[0, [49_999, 123, 20_000]] = 2
    assert draw(GREEDY, logits, stream).tolist() == [[123]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 5, 0.9, 3)])
def test_negative_infinity_is_never_chosen(stream: cuda.Stream, sampling: Sampling) -> None:
    logits = np.full((1, 4000), -np.inf, np.float32)
    logits[0, 77] = -1e30
    assert draw(sampling, logits, stream).tolist() == [[77]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 5, 0.9, 3)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_to_choose_nothing_from_give_no_token(stream: cuda.Stream, sampling: Sampling, bad: float) -> None:
    logits = np.zeros((2, 4000), np.float16)
    logits[1, 5] = bad
    if bad == -np.inf:
        logits[1] = bad
    first, second = draw(sampling, logits, stream)[:, 0].tolist()
    assert first >= 0
    assert second == -1


def test_inputs_of_the_next_step(stream: cuda.Stream) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 500)).astype(np.float32)
    sampler = DeviceSampler(GREEDY, 2, 500, "float32", stream, mask_slots=16)
    sampler.start([9, 9], [3, 10])
    on_device = cuda.copy_to_device(logits, stream)
    sampler.choose(on_device.address, 500)
    sampler.choose(on_device.address, 500)
    assert sampler.attention_mask is not None
    tokens = cuda.copy_to_host(sampler.input_ids, np.int64, (2,), stream)
    mask = cuda.copy_to_host(sampler.attention_mask, np.int64, (2, 16), stream)
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert cuda.copy_to_host(sampler.position_ids, np.int64, (2,), stream).tolist() == [5, 12]
    assert cuda.copy_to_host(sampler.seqlens_k, np.int32, (2,), stream).tolist() == [5, 12]
    assert mask.sum(axis=1).tolist() == [6, 13]  # the slots up to the next token's, and no other
    assert (mask == (np.arange(16) <= [[5], [12]])).all()


def test_a_row_that_is_held_stays_as_it_is(stream: cuda.Stream) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 500)).astype(np.float32)
    sampler = DeviceSampler(GREEDY, 2, 500, "float32", stream, mask_slots=16)
    sampler.start([9, 8], [3, 10])
    on_device = cuda.copy_to_device(logits, stream)
    sampler.choose(on_device.address, 500)
    sampler.hold(1, 7, 10)
    sampler.choose(on_device.address, 500)
    stream.synchronize()
    assert sampler.attention_mask is not None
    assert cuda.copy_to_host(sampler.input_ids, np.int64, (2,), stream).tolist() == [int(logits[0].argmax()), 7]
    assert cuda.copy_to_host(sampler.position_ids, np.int64, (2,), stream).tolist() == [5, 10]
    assert cuda.copy_to_host(sampler.seqlens_k, np.int32, (2,), stream).tolist() == [5, 10]
    mask = cuda.copy_to_host(sampler.attention_mask, np.int64, (2, 16), stream)
    assert (mask == (np.arange(16) <= [[5], [10]])).all()


def test_top_k_keeps_the_largest(stream: cuda.Stream) -> None:
    logits = np.random.default_rng(1).permutation(np.arange(20_000)).astype(np.float32)[None] / 20_000
    tokens = draw(Sampling(1.0, 5, 1.0, 3), logits, stream, steps=400)
    assert set(tokens[0].tolist()) == set(np.argsort(logits[0])[-5:].tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_it(stream: cuda.Stream) -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = np.log(probabilities).astype(np.float32)[None]
    assert set(draw(Sampling(1.0, 0, 0.85, 3), logits, stream, steps=300)[0].tolist()) == {0, 1, 2}
    assert set(draw(Sampling(1.0, 0, 0.65, 3), logits, stream, steps=300)[0].tolist()) == {0, 1}


def test_frequencies_follow_the_temperature(stream: cuda.Stream) -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]])).astype(np.float32)
    steps = 8000
    counts = np.bincount(draw(Sampling(2.0, 0, 1.0, 11), logits, stream, steps=steps)[0], minlength=4)
    expected = np.sqrt([0.5, 0.25, 0.125, 0.125])
    expected *= steps / expected.sum()
    # Chi-square with 3 degrees of freedom exceeds 21.1 with probability 1e-4; the seed is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 21.1


def test_a_seed_repeats_and_rows_differ(stream: cuda.Stream) -> None:
    logits = np.tile(np.random.default_rng(2).normal(size=(1, 5000)).astype(np.float16), (2, 1))
    first, again = (draw(Sampling(1.0, 50, 0.9, 7), logits, stream, steps=64) for _ in range(2))
    assert (first == again).all()
    assert (first[0] != first[1]).any()
    assert (draw(Sampling(1.0, 50, 0.9, 8), logits, stream, steps=64) != first).any()
