"""The result of a parity check: a verdict for each configuration, as data and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onnx_kv.parity.compare import TOLERANCE, PromptComparison
from onnx_kv.parity.configuration import Configuration, Recording


@dataclass(frozen=True)
class Verdict:
    """How one configuration compares with the reference, which is the first configuration and has nothing compared.

    `exact` says that every bit has to be equal, else tokens have to be and logits within `TOLERANCE`. `failure` is
    what made the run itself worthless: logits that are not finite.
    """

    configuration: Configuration
    recording: Recording
    reference: str | None
    exact: bool
    prompts: tuple[PromptComparison, ...]
    failure: str | None

    @property
    def bitwise(self) -> bool:
        """Whether tokens, logits of every step and the cache are the reference's, bit for bit."""
        return self.failure is None and all(prompt.bitwise for prompt in self.prompts)

    @property
    def tolerance(self) -> float:
        """How far logits may be off, as a share of the largest."""
        return 0.0 if self.exact else TOLERANCE[self.recording.precision]

    @property
    def same(self) -> bool:
        """Whether the run agrees with the reference as well as it has to."""
        return self.failure is None and all(
            prompt.first_token_difference is None
            and (prompt.bitwise if self.exact else prompt.relative <= self.tolerance)
            for prompt in self.prompts
        )

    def to_json(self) -> dict[str, Any]:
        """The entry of the report."""
        return {
            "name": self.configuration.name,
            "directory": self.configuration.directory,
            "kernels": "onnxruntime" if self.configuration.stock else "onnx_kv",
            "layout": self.recording.layout,
            "passes": list(self.recording.passes),
            "settings": dict(self.configuration.settings),
            "against": self.reference,
            "same": self.same,
            "bitwise": self.bitwise,
            "tolerance": self.tolerance,
            "max_abs": max((prompt.max_abs for prompt in self.prompts), default=0.0),
            "cache_max_abs": max((prompt.cache_max_abs for prompt in self.prompts), default=0.0),
            "failure": self.failure,
            "prompts": [asdict(prompt) for prompt in self.prompts],
            "tokens": [run.tokens for run in self.recording.runs],
            "stats": self.recording.stats,
        }


@dataclass(frozen=True)
class ParityReport:
    """The verdicts in the order in which the configurations ran; the first is the reference's."""

    verdicts: Sequence[Verdict]
    tokens: int

    @property
    def same(self) -> bool:
        """Whether every configuration agrees with the reference as well as it has to."""
        return all(verdict.same for verdict in self.verdicts)

    @property
    def bitwise(self) -> bool:
        """Whether all runs of our kernels are equal bit for bit; stock ONNX Runtime sums in another order."""
        return all(verdict.bitwise for verdict in self.verdicts if not verdict.configuration.stock)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types: `same`, `bitwise`, and one entry a configuration."""
        return {
            "same": self.same,
            "bitwise": self.bitwise,
            "tokens": self.tokens,
            "configurations": [verdict.to_json() for verdict in self.verdicts],
        }
