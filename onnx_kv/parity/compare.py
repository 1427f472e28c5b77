"""Comparing two recordings, prompt by prompt. Pure: arrays in, verdicts out.

Logits are compared as long as both runs had the same history: up to and including the first step that chose another
token, since beyond it the two speak of different texts. All figures are always computed; what they must be is decided
where the configurations are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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

    `steps` were comparable. `bitwise` is about their logits and tokens; `max_abs` is the largest difference between
    their logits, `largest_logit` the reference's largest magnitude.
    """

    prompt_length: int
    steps: int
    bitwise: bool
    max_abs: float
    largest_logit: float
    first_token_difference: Difference | None
    first_logit_difference: Difference | None

    @property
    def relative(self) -> float:
        """`max_abs` as a share of the largest logit."""
        return self.max_abs / self.largest_logit if self.largest_logit else self.max_abs


def compare_prompt(
    prompt_length: int,
    reference_tokens: Sequence[int],
    reference_logits: npt.NDArray[Any],
    tokens: Sequence[int],
    logits: npt.NDArray[Any],
) -> PromptComparison:
    """Compare two runs of as many steps; logits are [steps, vocabulary], finite, of any float type."""
    differing = [step for step, pair in enumerate(zip(reference_tokens, tokens, strict=True)) if pair[0] != pair[1]]
    steps = differing[0] + 1 if differing else len(reference_tokens)
    unequal = _unequal_steps(reference_logits[:steps], logits[:steps])
    return PromptComparison(
        prompt_length=prompt_length,
        steps=steps,
        bitwise=not differing and not unequal,
        max_abs=max((_max_abs(reference_logits[step], logits[step]) for step in unequal), default=0.0),
        largest_logit=float(np.abs(reference_logits[:steps]).max()),
        first_token_difference=_difference(differing, reference_logits, logits),
        first_logit_difference=_difference(unequal, reference_logits, logits),
    )


def _unequal_steps(reference: npt.NDArray[Any], logits: npt.NDArray[Any]) -> list[int]:
    """The steps whose logits differ in a bit, the sign of a zero included."""
    bits = np.dtype(f"u{reference.itemsize}")
    unequal = (reference.view(bits) != logits.view(bits)).any(axis=1)
    return [int(step) for step in unequal.nonzero()[0]]


def _difference(steps: Sequence[int], reference: npt.NDArray[Any], logits: npt.NDArray[Any]) -> Difference | None:
    if not steps:
        return None
    second, first = np.partition(reference[steps[0]].astype(np.float64), -2)[-2:]
    return Difference(steps[0], _max_abs(reference[steps[0]], logits[steps[0]]), float(first - second))


def _max_abs(reference: npt.NDArray[Any], logits: npt.NDArray[Any]) -> float:
    return float(np.abs(reference.astype(np.float64) - logits.astype(np.float64)).max())
