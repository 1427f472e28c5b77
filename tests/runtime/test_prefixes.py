"""Decoders whose rows start from a shared prefix, against decoders that compute every row by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnx_kv.errors import CapacityError, ConfigError, OutOfMemoryError
from onnx_kv.layout import KvLayout
from onnx_kv.memory import MemoryBudget
from onnx_kv.runtime.decoder import Decoder
from tests.conftest import Patched

LAYOUTS = [layout.cli_name for layout in KvLayout]
PREFIX = [int(token) for token in np.random.default_rng(0).integers(3, 256, 320)]
TAILS = [[7, 8, 9], [100], [30, 40, 50, 60, 70, 80, 90]]
SETTINGS = {"growth": "fixed-stride", "prefill_chunk": 64}


def generate(
    decoder: Decoder, prompts: Any = None, count: int = 40
) -> tuple[list[tuple[int | None, ...]], NDArray[Any]]:
    steps = list(decoder.stream(prompts, max_new_tokens=count, stop_tokens=(), logits=True))
    return [step.tokens for step in steps], np.stack([step.logits for step in steps if step.logits is not None])


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1].tobytes() == expected[1].tobytes(), "the logits differ in a bit"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [320, 256])
def test_the_same_tokens_and_logits_with_and_without_sharing(layout: str, length: int, patched: Patched) -> None:
    """The prefix is a multiple of `prefill_chunk`, so that both run the same pieces and no bit can differ."""
    directory = patched("qwen2-tiny", layout)
    prompts = [PREFIX[:length] + tail for tail in TAILS]
    private, shared = Decoder(directory, **SETTINGS), Decoder(directory, **SETTINGS)
    shared.share_prefix(PREFIX[:length])
    expected = generate(private, prompts)
    assert_same(generate(shared, prompts), expected)
    stats = shared.stats
    assert stats.prompt_tokens == length + sum(map(len, TAILS))
    assert stats.shared_starts == 3, dict(stats.copy_reasons)
    assert stats.borrowed_kv_bytes > 0
    assert stats.copied_starts == 0
    assert not stats.copy_reasons
    assert_same(generate(shared, prompts), expected)  # the first turn wrote nothing into the prefix
    private.rewind(100)
    shared.rewind(100)
    for decoder in (private, shared):
        decoder.append([tail * 20 for tail in TAILS])
    assert_same(generate(shared), generate(private))  # but this one does
    assert shared.stats.detached_granules > 0
    assert_same(generate(shared, prompts), expected)


@pytest.mark.parametrize("growth", ["bucket", "realloc"])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_buckets_start_from_a_copy(growth: str, layout: str, patched: Patched) -> None:
    directory = patched("qwen2-tiny", layout)
    settings = {**SETTINGS, "growth": growth}
    prompts = [PREFIX + tail for tail in TAILS]
    shared = Decoder(directory, **settings)
    shared.share_prefix(PREFIX)
    assert_same(generate(shared, prompts), generate(Decoder(directory, **settings), prompts))
    assert (shared.stats.shared_starts, shared.stats.copied_starts) == (0, 3)
    assert [reason.split(":")[0] for reason in shared.stats.copy_reasons] == ["policy"]
    assert sum(shared.stats.copy_reasons.values()) == 3


@pytest.fixture(scope="module")
def token_major(patched: Patched) -> Path:
    return patched("qwen2-tiny", "token-major")


def test_a_ragged_prefix_gives_what_the_same_pieces_give(token_major: Path) -> None:
    shared, pieces = (Decoder(token_major, **SETTINGS) for _ in range(2))
    shared.share_prefix(PREFIX[:301])
    pieces.generate(PREFIX[:301], max_new_tokens=1)
    pieces.rewind(301)
    pieces.append(TAILS[2])
    assert_same(generate(shared, PREFIX[:301] + TAILS[2]), generate(pieces))


def test_the_longest_prefix_counts_and_one_starts_from_another(token_major: Path) -> None:
    shared = Decoder(token_major, **SETTINGS)
    shared.share_prefix(PREFIX[:64])
    shared.share_prefix(PREFIX[:192])
    shared.share_prefix(PREFIX[:192])
    assert shared.stats.prompt_tokens == 192
    prompts = [PREFIX[:200], PREFIX[:192], PREFIX[:100], TAILS[2]]
    found = generate(shared, prompts)
    assert found[0] == generate(Decoder(token_major, **SETTINGS), prompts)[0]
    assert shared.stats.prompt_tokens == 192 + 8 + 1 + 36 + 7
    assert shared.stats.shared_starts + shared.stats.copied_starts == 1 + 3


def test_prefixes_are_charged_once_and_given_back(token_major: Path) -> None:
    budget = MemoryBudget(64 * 2**20)
    shared = Decoder(token_major, budget=budget, **SETTINGS)
    shared.share_prefix(PREFIX)
    alone = budget.held
    assert alone == shared.stats.physical_kv_bytes > 0
    generate(shared, [PREFIX + tail for tail in TAILS], 8)
    stats = shared.stats
    assert budget.held == stats.physical_kv_bytes < 2 * alone + stats.borrowed_kv_bytes
    shared.drop_prefixes()
    assert shared.stats.physical_kv_bytes < budget.held <= stats.physical_kv_bytes, "rows still map it"
    generate(shared, [TAILS[2]], 4)
    shared.close()
    assert budget.held == 0


def test_prefixes_that_cannot_be_are_refused(token_major: Path) -> None:
    decoder = Decoder(token_major, max_length=64, **SETTINGS)
    with pytest.raises(ConfigError, match="at least one token"):
        decoder.share_prefix([])
    with pytest.raises(ConfigError, match="the shared prefix has the token 512; the model has tokens from 0 to 511"):
        decoder.share_prefix([512])
    with pytest.raises(CapacityError, match="the shared prefix has 64 tokens, and a row has room for 64"):
        decoder.share_prefix(PREFIX[:64])
    budget = MemoryBudget(4096)
    small = Decoder(token_major, budget=budget, **SETTINGS)
    with pytest.raises(OutOfMemoryError):
        small.share_prefix(PREFIX)
    assert budget.held == 0
    assert small.stats.prompt_tokens == 0
