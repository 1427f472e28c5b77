"""What an output may depend on: equal bits whatever the layout, the threads, the batch and the chunks of a prompt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.gqa_cases import Shape, attributes, make_call
from tests.support.gqa_reference import GqaInputs, GqaOutputs
from tests.support.ort_gqa import Way, run_gqa

SHAPES = {
    "prefill": Shape((0,), (150,), 150, 2, 3, 32),
    "decode": Shape((700,), (1,), 1, 1, 7, 64),
    "decode of heads together": Shape((300,), (1,), 1, 8, 2, 64),
    "chunk": Shape((140, 9), (20, 5), 20, 2, 2, 40),
}


def call_of(shape: Shape, dtype: Any = np.float32) -> GqaInputs:
    """A call with everything that could be done in another order."""
    return make_call(shape, dtype=dtype, rotary_dim=shape.head_dim, bias=(True, True), sink=True, query_seqlens=True)


def same_bits(first: GqaOutputs, second: GqaOutputs) -> None:
    """Outputs and presents agree bit for bit."""
    for name in ("output", "present_key", "present_value"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_layouts_and_threads(name: str, dtype: Any) -> None:
    shape = SHAPES[name]
    node, call = attributes(shape, do_rotary=True, softcap=5.0, local_window_size=100), call_of(shape, dtype)
    first = run_gqa(node, call, Way(0))
    layouts = [0, 1, 2, 3] if call.past_key is not None else [0, 1]
    ways = [Way(layout, packed=packed, threads=threads) for layout in layouts for packed, threads in ((0, 3), (1, 1))]
    for way in ways:
        same_bits(run_gqa(node, call, way), first)


def test_a_sequence_alone_and_in_a_batch() -> None:
    """One sequence with one KV head is split along its keys between threads, five are not."""
    shape = Shape((700, 3, 0, 260, 129), (1, 1, 4, 0, 2), 4, 1, 7, 64)
    node, call = attributes(shape, do_rotary=True), call_of(shape)
    together = run_gqa(node, call, Way(1))
    for b, fresh in enumerate(shape.fresh):
        alone = GqaInputs(
            **{
                name: value
                if not isinstance(value, np.ndarray) or name.endswith(("_cache", "sink"))
                else value[b : b + 1]
                for name, value in vars(call).items()
            }
        )
        if fresh < 4:  # with less padding too
            for name in ("query", "key", "value"):
                setattr(alone, name, getattr(alone, name)[:, : max(fresh, 1)])
            assert alone.attention_bias is not None
            alone.attention_bias = alone.attention_bias[:, :, : max(fresh, 1)]
        found = run_gqa(node, alone, Way(1))
        np.testing.assert_array_equal(found.output[0, :fresh], together.output[b, :fresh])


def test_padding_rows_are_zero() -> None:
    shape = SHAPES["chunk"]
    found = run_gqa(attributes(shape, do_rotary=True), call_of(shape), Way(0))
    assert not found.output[1, 5:].any()


@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_prompt_in_chunks(step: int) -> None:
    shape = Shape((0,), (150,), 150, 2, 3, 32)
    node, whole = attributes(shape, do_rotary=True, local_window_size=90), make_call(shape, rotary_dim=32)
    expected = run_gqa(node, whole, Way(1))
    present_key = present_value = None
    for begin in range(0, 150, step):
        end = min(begin + step, 150)
        part = GqaInputs(
            query=whole.query[:, begin:end],
            key=whole.key[:, begin:end],
            value=whole.value[:, begin:end],
            seqlens_k=np.array([end - 1], np.int32),
            capacity=150,
            past_key=present_key,
            past_value=present_value,
            cos_cache=whole.cos_cache,
            sin_cache=whole.sin_cache,
        )
        found = run_gqa(node, part, Way(1, total=150))
        present_key, present_value = found.present_key, found.present_value
        np.testing.assert_array_equal(found.output, expected.output[:, begin:end])


def test_later_tokens_cannot_reach_earlier_ones() -> None:
    """Not even where they are not numbers: a weight of zero is not multiplied by what is not seen."""
    shape = Shape((130,), (9,), 9, 1, 2, 16)
    node, call = attributes(shape), make_call(shape)
    expected = run_gqa(node, call, Way(0))
    call.key[:, 6:] = np.nan
    call.value[:, 6:] = np.inf
    found = run_gqa(node, call, Way(0))
    np.testing.assert_array_equal(found.output[:, :6], expected.output[:, :6])
    assert np.isnan(found.output[:, 6:]).all()


def test_tokens_before_the_window_cannot_reach_it() -> None:
    shape = Shape((130,), (9,), 9, 1, 2, 16)
    node, call = attributes(shape, local_window_size=20), make_call(shape)
    expected = run_gqa(node, call, Way(0))
    assert call.past_key is not None
    assert call.past_value is not None
    call.past_key[:, :, :111] = np.nan
    call.past_value[:, :, :111] = np.inf
    np.testing.assert_array_equal(run_gqa(node, call, Way(0)).output, expected.output)


@pytest.mark.parametrize("layout", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages with mprotect")
def test_memory_beyond_the_live_prefix_is_not_touched(layout: int, dtype: str) -> None:
    """The pages that follow the live prefix cannot be read, and one vector too far would end the process."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.guarded_gqa", str(layout), dtype],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["agrees", "agrees"]
