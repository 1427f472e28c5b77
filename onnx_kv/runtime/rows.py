"""A batch's rows: what has been said in each, how much of it is in the cache, and why it ended."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from onnx_kv.runtime.sampling import Sampling


class FinishReason(enum.StrEnum):
    """Why a row got no further token."""

    STOP = "stop"
    """It generated a stop token, which is its last."""

    MAX_NEW_TOKENS = "max_new_tokens"
    """It generated as many tokens as were asked for."""

    MAX_LENGTH = "max_length"
    """It is as long as a row may be."""


@dataclass
class Row:
    """One sequence. Keys and values of `tokens[:cached]` are in the cache; the token chosen last is not yet.

    `limit` is the length at which this generation ends.
    """

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    limit: int = 0
    finish: FinishReason | None = None


@dataclass(frozen=True)
class Chosen:
    """Tokens chosen in one step, by row, and the logits they were chosen from ([rows, vocabulary]) if asked for."""

    tokens: Mapping[int, int]
    logits: npt.NDArray[Any] | None


class Engine(Protocol):
    """Runs the model on one kind of device, over the cache it was made with."""

    def make_room(self, lengths: Sequence[int]) -> None:
        """Make room in the cache for `lengths[row]` tokens of each row.

        Raises:
            OutOfMemoryError: there is no memory for them; the cache is as it was.
        """

    def prefill(self, row: int, tokens: Sequence[int], past: int) -> None:
        """Put `tokens` of a row behind the `past` tokens that the cache holds of it; keep the last one's logits.

        The cache has room for them.
        """

    def decode(self, rows: Sequence[Row], sampling: Sampling, logits: bool) -> Iterator[Chosen]:
        """Choose a token for every row that has not finished, step after step, from the logits there are.

        Between two steps the caller appends the tokens to their rows and sets `finish`; it stops asking when it wants
        no more. A row that has finished stays as it is. The engine makes room in the cache before each step and keeps
        `cached` of each row.

        Raises:
            ModelOutputError: a row's logits have nothing to choose from.
            OutOfMemoryError: the cache cannot grow; every token before was handed out.
            NativeError: a run failed.
        """

    def close(self) -> None:
        """Release what the engine holds; work in flight is waited for."""
