from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from onnx_kv.errors import ConfigError, ModelOutputError
from onnx_kv.runtime.sampling import HostSampler, Sampling


def draws(sampling: Sampling, logits: list[float], count: int) -> list[int]:
    sampler = HostSampler(sampling, 1)
    batch = np.array([logits], np.float32)
    return [sampler.choose(batch, [0])[0] for _ in range(count)]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert draws(Sampling(), [1.0, 3.0, 3.0, 2.0], 3) == [1, 1, 1]


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    assert set(draws(Sampling(temperature=5.0, top_k=1), [0.0, 2.0, 1.0], 50)) == {1}


def test_frequencies_follow_the_softmax() -> None:
    logits, temperature, count = [0.0, 1.0, 2.0], 0.7, 20_000
    seen = Counter(draws(Sampling(temperature=temperature, seed=3), logits, count))
    weights = np.exp(np.array(logits) / temperature)
    for token, share in enumerate(weights / weights.sum()):
        deviation = np.sqrt(share * (1 - share) / count)
        assert abs(seen[token] / count - share) < 5 * deviation


def test_top_k_keeps_the_largest() -> None:
    assert set(draws(Sampling(temperature=10.0, top_k=2), [5.0, 1.0, 4.0, 2.0], 200)) == {0, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = list(np.log([0.1, 0.5, 0.15, 0.25]))
    assert set(draws(Sampling(temperature=1.0, top_p=0.5), logits, 200)) == {1}
    assert set(draws(Sampling(temperature=1.0, top_p=0.7), logits, 200)) == {1, 3}
    assert set(draws(Sampling(temperature=1.0, top_p=0.76), logits, 400)) == {1, 2, 3}


def test_equals_of_the_last_one_kept_are_kept() -> None:
    assert set(draws(Sampling(temperature=1.0, top_k=2), [2.0, 1.0, 1.0, 0.0], 300)) == {0, 1, 2}


def test_a_seed_gives_the_same_tokens_and_another_does_not() -> None:
    logits = list(np.linspace(0, 1, 50))
    first = draws(Sampling(temperature=1.0, seed=7), logits, 40)
    assert first == draws(Sampling(temperature=1.0, seed=7), logits, 40)
    assert first != draws(Sampling(temperature=1.0, seed=8), logits, 40)


def test_a_row_draws_the_same_whatever_the_other_rows_do() -> None:
    logits = np.tile(np.linspace(0, 1, 50, dtype=np.float32), (2, 1))
    together, alone = (HostSampler(Sampling(temperature=1.0), 2) for _ in range(2))
    both = [together.choose(logits, [0, 1])[1] for _ in range(10)]
    assert both == [alone.choose(logits, [1])[0] for _ in range(10)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = np.zeros((2, 5), np.float16)
    logits[1, 3] = bad
    sampler = HostSampler(Sampling(), 2)
    assert sampler.choose(logits, [0]) == [0]
    with pytest.raises(ModelOutputError, match=r"row 1 are not finite: (nan|inf) at token 3"):
        sampler.choose(logits, [1])


def test_minus_infinity_bars_a_token_and_not_all_of_them() -> None:
    logits = np.full((1, 5), -np.inf, np.float32)
    with pytest.raises(ModelOutputError, match="-inf at token 0"):
        HostSampler(Sampling(), 1).choose(logits, [0])
    logits[0, 2] = -7.0
    assert HostSampler(Sampling(temperature=1.0), 1).choose(logits, [0]) == [2]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": np.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]
