"""What every pass is: a plan that refuses or says what it would do, then all of it or nothing.

The passes that changed a model are recorded in its metadata under `onnx_kv.passes`, comma-separated.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import onnx_ir as ir

from onnx_kv.graph import PASSES_KEY, applied_passes


@dataclass(frozen=True)
class Plan:
    """What a pass will do to a model: `changes` and `notes` are sentences for people, `apply` does it.

    Without changes the model already is as wanted. Notes tell what else is worth knowing, done or not.
    """

    changes: tuple[str, ...]
    notes: tuple[str, ...]
    apply: Callable[[], None]


@dataclass(frozen=True)
class PassOutcome:
    """What a pass did: `changes` is empty where the model already was as wanted."""

    name: str
    changes: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class PassReport(ir.passes.PassResult):
    """The result of a pass, as onnx_ir wants it, with what it did."""

    outcome: PassOutcome


class GraphPass(ir.passes.InPlacePass):
    """A pass of this project. Subclasses plan; planning never changes the model."""

    name: str

    @property
    def leaves_mark(self) -> bool:
        """Whether a model that the pass changed counts as one to which it is applied; False when it undoes itself."""
        return True

    def __call__(self, model_or_result: ir.Model | ir.passes.PassResult, /) -> PassReport:
        """Apply the pass to a model.

        Raises:
            PatchRefusedError: as `plan`; the model is unchanged.
        """
        return cast(PassReport, super().__call__(model_or_result))

    @abc.abstractmethod
    def plan(self, model: ir.Model) -> Plan:
        """Decide what to do.

        Raises:
            PatchRefusedError: the pass does not fit the model; names every node at fault with its reason.
        """

    def call(self, model: ir.Model) -> PassReport:
        """Plan and do it.

        Raises:
            PatchRefusedError: as `plan`; the model is unchanged.
        """
        plan = self.plan(model)
        if plan.changes:
            plan.apply()
            self._record(model)
        return PassReport(model, bool(plan.changes), PassOutcome(self.name, plan.changes, plan.notes))

    def _record(self, model: ir.Model) -> None:
        names = set(applied_passes(model)) - {self.name} | ({self.name} if self.leaves_mark else set())
        if names:
            model.metadata_props[PASSES_KEY] = ",".join(sorted(names))
        else:
            model.metadata_props.pop(PASSES_KEY, None)


def count(number: int, noun: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
