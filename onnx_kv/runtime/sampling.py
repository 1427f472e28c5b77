"""Choosing the next token from logits on the host.

The steps are the common ones, in the common order: divide by the temperature, keep the `top_k` largest, keep the
smallest set of the largest whose probability reaches `top_p`, draw. Tokens as likely as the last one kept are kept too,
so that the kept set does not depend on an order among equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.errors import ConfigError, ModelOutputError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The default is greedy: the largest logit, the lowest id among equals.

    `temperature` 0 is greedy and ignores the rest; `top_k` 0 and `top_p` 1 keep every token. Equal seeds give equal
    tokens; each row of a batch draws from a stream of its own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature={self.temperature}: must be a number of at least 0 (0 is greedy)")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}: must be at least 0 (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: must be above 0 and at most 1 (1 keeps every token)")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: must be at least 0")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is always taken."""
        return self.temperature == 0


GREEDY = Sampling()


class HostSampler:
    """Chooses a token for each row of a batch, step after step."""

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self._sampling = sampling
        self._streams = [np.random.default_rng((sampling.seed, row)) for row in range(rows)]

    def choose(self, logits: npt.NDArray[Any], rows: Sequence[int]) -> list[int]:
        """Return a token for each of `rows`, given the logits of all rows ([rows, vocabulary], any float type).

        Raises:
            ModelOutputError: the logits of one of the rows have nothing to choose from.
        """
        return [self._choose(logits[row], row) for row in rows]

    def _choose(self, logits: npt.NDArray[Any], row: int) -> int:
        values = logits.astype(np.float32)
        check_logits(values, row)
        if self._sampling.greedy:
            return int(values.argmax())
        probabilities = self._probabilities(values.astype(np.float64))
        bounds = probabilities.cumsum()
        drawn = self._streams[row].random() * bounds[-1]
        return min(int(bounds.searchsorted(drawn, side="right")), int(probabilities.nonzero()[0][-1]))

    def _probabilities(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The probabilities to draw from, not normalised; 0 for tokens that are not kept."""
        sampling = self._sampling
        weights: npt.NDArray[np.float64] = np.exp((values - values.max()) / sampling.temperature)
        if 0 < sampling.top_k < len(values):
            kth = np.partition(values, -sampling.top_k)[-sampling.top_k]
            weights[values < kth] = 0.0
        if sampling.top_p < 1:
            order = np.sort(weights)[::-1]
            upto = order.cumsum()
            last = int(upto.searchsorted(sampling.top_p * upto[-1]))
            weights[weights < order[min(last, len(order) - 1)]] = 0.0
        return weights


def check_logits(logits: npt.NDArray[Any], row: int) -> None:
    """Raise ModelOutputError where a row of logits has a NaN or +inf, or nothing but -inf, which bars a token."""
    bad = ~(logits < np.inf)
    if bad.any() or np.isneginf(logits).all():
        token = int(bad.argmax())
        raise ModelOutputError(
            f"the model's logits of row {row} are not finite: {logits[token]} at token {token}; the weights or a "
            "kernel are at fault, or float16 overflowed"
        )
