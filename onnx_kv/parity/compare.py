"""Comparing two recordings, prompt by prompt. Pure: arrays in, verdicts out.

Logits, and the keys and values in the cache, are compared as long as both runs had the same history: up to and
including the first step that chose another token, since beyond it the two speak of different texts. All figures are
always computed; what they must be is decided where the configurations are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.errors import ParityError
from onnx_kv.parity.configuration import Run

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1, "int8": 5e-2}
"""Largest difference between logits of two right computations, as a share of the largest logit, by what the model
rounds its activations to.

Different kernels sum in different orders. In float32 that leaves about 1e-6 a layer, so 1e-4 is generous and any wrong
operand is far beyond it. float16 and bfloat16 round every activation to 2^-11 and 2^-8 of its size; forty roundings of
independent sign reach the figures here. Products in int8 round a block of activations to 2^-7 of its largest: a sum
that differs in its last bit can fall on the other side, which has been seen to move logits by 1e-2.
"""


@dataclass(frozen=True)
class Difference:
    """The first step at which something differs.

    `max_abs` is the largest difference between the step's logits, `margin` what the reference's largest logit has over
    its second: a step whose margin is below `max_abs` could have gone either way.
    """

    step: int
    max_abs: float
    margin: float


@dataclass(frozen=True)
class PromptComparison:
    """How the run after one prompt compares with the reference's.

    `steps` were comparable. `bitwise` is about their tokens and logits, and the keys and values of all tokens that they
    were computed from. `max_abs` is the largest difference between the logits, `largest_logit` the reference's largest
    magnitude; `cache_max_abs` and `largest_cached` are the same of keys and values.
    """

    prompt_length: int
    steps: int
    bitwise: bool
    max_abs: float
    largest_logit: float
    cache_max_abs: float
    largest_cached: float
    first_token_difference: Difference | None
    first_logit_difference: Difference | None

    @property
    def relative(self) -> float:
        """The largest difference as a share of the largest value: of logits, or of the cache where that is worse."""
        return max(self.max_abs / (self.largest_logit or 1.0), self.cache_max_abs / (self.largest_cached or 1.0))


def compare_prompt(prompt_length: int, reference: Run, run: Run) -> PromptComparison:
    """Compare two runs of as many steps, with finite logits of any float type.

    Raises:
        ParityError: logits or caches have other shapes, so the models are not the same.
    """
    _check_shapes(reference, run)
    differing = [step for step, pair in enumerate(zip(reference.tokens, run.tokens, strict=True)) if pair[0] != pair[1]]
    steps = differing[0] + 1 if differing else len(reference.tokens)
    unequal = [step for step in range(steps) if not _equal_bits(reference.logits[step], run.logits[step])]
    live = prompt_length + steps - 1  # the tokens that both have computed with; beyond them the cache holds anything
    caches = [(ours[:, :live], theirs[:, :live]) for ours, theirs in zip(reference.cache, run.cache, strict=True)]
    return PromptComparison(
        prompt_length=prompt_length,
        steps=steps,
        bitwise=not differing and not unequal and all(_equal_bits(*pair) for pair in caches),
        max_abs=max((_max_abs(reference.logits[step], run.logits[step]) for step in unequal), default=0.0),
        largest_logit=_largest(reference.logits[:steps]),
        cache_max_abs=max((_max_abs(*pair) for pair in caches), default=0.0),
        largest_cached=max((_largest(pair[0]) for pair in caches), default=0.0),
        first_token_difference=_difference(differing, reference.logits, run.logits),
        first_logit_difference=_difference(unequal, reference.logits, run.logits),
    )


def _check_shapes(reference: Run, run: Run) -> None:
    ours, theirs = ([list(values.shape) for values in (one.logits, *one.cache)] for one in (reference, run))
    if ours != theirs:
        differing = next(
            (pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), (len(ours), len(theirs))
        )
        raise ParityError(
            f"these are different models: the shapes of logits, keys and values differ ({differing[0]}, {differing[1]})"
        )


def _equal_bits(reference: npt.NDArray[Any], values: npt.NDArray[Any]) -> bool:
    """Whether two arrays are equal in every bit, the signs of zeros included."""
    bits = np.dtype(f"u{reference.itemsize}")
    return bool((np.ascontiguousarray(reference).view(bits) == np.ascontiguousarray(values).view(bits)).all())


def _difference(steps: Sequence[int], reference: npt.NDArray[Any], logits: npt.NDArray[Any]) -> Difference | None:
    if not steps:
        return None
    second, first = np.partition(reference[steps[0]].astype(np.float64), -2)[-2:]
    return Difference(steps[0], _max_abs(reference[steps[0]], logits[steps[0]]), float(first - second))


def _max_abs(reference: npt.NDArray[Any], logits: npt.NDArray[Any]) -> float:
    return float(np.abs(reference.astype(np.float64) - logits.astype(np.float64)).max(initial=0.0))


def _largest(values: npt.NDArray[Any]) -> float:
    return float(np.abs(values.astype(np.float64)).max(initial=0.0))
