"""Compares two benchmark results row by row, and calls a difference only what exceeds both runs' noise."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from onnx_kv.bench.result import Result, Row


class Verdict(enum.StrEnum):
    """What became of a row."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    NOISE = "within noise"
    KNOBS = "knobs differ"
    ONLY_BASE = "only in base"
    ONLY_HEAD = "only in head"


@dataclass(frozen=True)
class Difference:
    """A row of either run; `slowdown` is head over base, turned so that more than 1 is worse, None without both."""

    name: str
    verdict: Verdict
    base: Row | None
    head: Row | None
    slowdown: float | None = None
    bound: float | None = None


def compare(base: Result, head: Result, *, threshold: float = 0.03) -> list[Difference]:
    """Compare rows of the same name.

    A row regresses (improves) where it is worse (better) by more than `threshold` and by more than half of both runs'
    spreads together, which is what two runs of the same code may differ by. Rows whose knobs differ are not compared.
    """
    bases = {row.name: row for row in base.rows}
    heads = {row.name: row for row in head.rows}
    return [_difference(name, bases.get(name), heads.get(name), threshold) for name in {**bases, **heads}]


def _difference(name: str, base: Row | None, head: Row | None, threshold: float) -> Difference:
    if base is None or head is None:
        return Difference(name, Verdict.ONLY_HEAD if base is None else Verdict.ONLY_BASE, base, head)
    if base.knobs != head.knobs or base.unit != head.unit or not base.median or not head.median:
        return Difference(name, Verdict.KNOBS, base, head)
    slowdown = base.median / head.median if base.higher_is_better else head.median / base.median
    bound = max(threshold, (base.spread + head.spread) / 2)
    if slowdown > 1 + bound:
        verdict = Verdict.REGRESSION
    elif slowdown < 1 / (1 + bound):
        verdict = Verdict.IMPROVEMENT
    else:
        verdict = Verdict.NOISE
    return Difference(name, verdict, base, head, slowdown, bound)
