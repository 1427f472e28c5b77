from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from onnx_kv.errors import ParityError
from onnx_kv.parity.compare import compare_prompt
from onnx_kv.parity.configuration import Run


def run(tokens: list[int], values: NDArray[np.floating], cache: NDArray[np.floating] | None = None) -> Run:
    return Run(tokens, values, [np.ones((2, 6, 3), np.float32)] if cache is None else [cache])


def logits(steps: int = 4) -> NDArray[np.float32]:
    """Rows that rise, so that the last token is the largest with a margin of 1."""
    return np.tile(np.arange(5, dtype=np.float32), (steps, 1))


def test_equal_runs() -> None:
    compared = compare_prompt(3, run([4] * 4, logits()), run([4] * 4, logits()))
    assert compared.bitwise
    assert (compared.prompt_length, compared.steps, compared.max_abs, compared.largest_logit) == (3, 4, 0.0, 4.0)
    assert compared.first_token_difference is None
    assert compared.first_logit_difference is None


def test_a_difference_of_one_bit_is_found_with_its_step_and_margin() -> None:
    other = logits()
    other[2, 1] = np.nextafter(np.float32(1), np.float32(2))
    other[3, 0] = 0.5
    compared = compare_prompt(1, run([4] * 4, logits()), run([4] * 4, other))
    assert not compared.bitwise
    assert compared.max_abs == 0.5
    assert compared.relative == 0.125
    first = compared.first_logit_difference
    assert first is not None
    assert (first.step, first.max_abs, first.margin) == (2, pytest.approx(1.19e-7, rel=0.01), 1.0)
    assert compared.first_token_difference is None


def test_the_sign_of_a_zero_is_a_bit() -> None:
    other = logits()
    other[0, 0] = -0.0
    compared = compare_prompt(1, run([4] * 4, logits()), run([4] * 4, other))
    assert not compared.bitwise
    assert compared.max_abs == 0.0


def test_nothing_is_compared_beyond_the_first_other_token() -> None:
    other = logits()
    other[1] = [0, 1, 2, 3.5, 3]
    other[2:] = 100.0
    compared = compare_prompt(1, run([4, 4, 4, 4], logits()), run([4, 3, 0, 0], other))
    assert compared.steps == 2
    assert compared.max_abs == 1.0
    first = compared.first_token_difference
    assert first is not None
    assert (first.step, first.max_abs, first.margin) == (1, 1.0, 1.0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_every_float_type(dtype: type[np.floating]) -> None:
    ours, theirs = logits().astype(dtype), logits().astype(dtype)
    assert compare_prompt(1, run([4] * 4, ours), run([4] * 4, theirs)).bitwise
    theirs[1, 1] += dtype(0.25)
    assert compare_prompt(1, run([4] * 4, ours), run([4] * 4, theirs)).max_abs == 0.25


def test_the_cache_is_compared_where_both_have_written_the_same_tokens() -> None:
    other = np.ones((2, 6, 3), np.float32)
    other[:, 4:] = np.nan  # of four steps after one prompt token, the last one's token is not in the cache
    assert compare_prompt(1, run([4] * 4, logits()), run([4] * 4, logits(), other)).bitwise
    other[1, 3, 2] = 1.5
    compared = compare_prompt(1, run([4] * 4, logits()), run([4] * 4, logits(), other))
    assert not compared.bitwise
    assert compared.first_logit_difference is None
    assert (compared.cache_max_abs, compared.largest_cached, compared.relative) == (0.5, 1.0, 0.5)


def test_other_shapes_are_other_models() -> None:
    with pytest.raises(ParityError, match=r"\[2, 6, 3\].*\[2, 6, 4\]"):
        compare_prompt(1, run([4] * 4, logits()), run([4] * 4, logits(), np.ones((2, 6, 4), np.float32)))
