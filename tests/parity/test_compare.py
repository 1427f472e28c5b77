from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from onnx_kv.parity.compare import compare_prompt


def logits(steps: int = 4) -> NDArray[np.float32]:
    """Rows that rise, so that the last token is the largest with a margin of 1."""
    return np.tile(np.arange(5, dtype=np.float32), (steps, 1))


def test_equal_runs() -> None:
    compared = compare_prompt(3, [4, 4, 4, 4], logits(), [4, 4, 4, 4], logits())
    assert compared.bitwise
    assert (compared.prompt_length, compared.steps, compared.max_abs, compared.largest_logit) == (3, 4, 0.0, 4.0)
    assert compared.first_token_difference is None
    assert compared.first_logit_difference is None


def test_a_difference_of_one_bit_is_found_with_its_step_and_margin() -> None:
    other = logits()
    other[2, 1] = np.nextafter(np.float32(1), np.float32(2))
    other[3, 0] = 0.5
    compared = compare_prompt(1, [4] * 4, logits(), [4] * 4, other)
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
    compared = compare_prompt(1, [4] * 4, logits(), [4] * 4, other)
    assert not compared.bitwise
    assert compared.max_abs == 0.0


def test_nothing_is_compared_beyond_the_first_other_token() -> None:
    other = logits()
    other[1] = [0, 1, 2, 3.5, 3]
    other[2:] = 100.0
    compared = compare_prompt(1, [4, 4, 4, 4], logits(), [4, 3, 0, 0], other)
    assert compared.steps == 2
    assert compared.max_abs == 1.0
    first = compared.first_token_difference
    assert first is not None
    assert (first.step, first.max_abs, first.margin) == (1, 1.0, 1.0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_every_float_type(dtype: type[np.floating]) -> None:
    ours, theirs = logits().astype(dtype), logits().astype(dtype)
    assert compare_prompt(1, [4] * 4, ours, [4] * 4, theirs).bitwise
    theirs[1, 1] += dtype(0.25)
    assert compare_prompt(1, [4] * 4, ours, [4] * 4, theirs).max_abs == 0.25
