"""The decode step as a captured CUDA graph: when it is captured, replayed, kept, given up, or not captured at all.

A graph has device pointers and kernel arguments baked in. It stays valid while the cache's signature, every binding's
(address, shape), is the same, and not a growth longer: the default is to give it up. A captured step goes through

    warm-up runs → capture → replays → (signature changed: invalidation) → warm-up runs → capture → …

Counting convention: each capture follows `WARM_UP_RUNS` plain runs with the same bindings. The step that is captured is
launched too, as the first replay. The first binding counts as an invalidation, as every later change of the signature
does. A growth that leaves the signature as it was and moved no byte is a keep, whether or not there is a graph to keep.

Whether a step can be captured at all is asked once, of the predicates in `PREDICATES`; the first that says no is the
`decline_reason`. A capture that fails ends, its step runs plainly, and so does every later one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from onnx_kv.errors import ConfigError
from onnx_kv.runtime.config import GraphMode
from onnx_kv.runtime.growth_event import GrowthEvent
from onnx_kv.runtime.stats import Stats

WARM_UP_RUNS = 2
"""Plain runs before a capture: ONNX Runtime and its libraries allocate what a step needs, which a capture may not."""


@dataclass(frozen=True)
class StepFacts:
    """What decides whether a decode step can be captured."""

    mode: GraphMode
    on_cuda: bool
    """Whether the model runs on a CUDA device."""
    foreign_nodes: tuple[str, ...] = ()
    """Nodes that another provider than CUDA runs."""
    moving_inputs: tuple[str, ...] = ()
    """Inputs whose shape or host value changes from step to step."""
    logits_on_device: bool = True
    """Whether the logits stay on the device and the next token is chosen there."""


def _named(nodes: tuple[str, ...]) -> str:
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return ", ".join(nodes[:3]) + more


PREDICATES: dict[str, Callable[[StepFacts], str | None]] = {
    "policy": lambda facts: "graphs are off" if facts.mode is GraphMode.OFF else None,
    "no_cuda_device": lambda facts: None if facts.on_cuda else "the model does not run on a CUDA device",
    "unsupported_node": lambda facts: (
        f"not run by the CUDA provider: {_named(facts.foreign_nodes)}" if facts.foreign_nodes else None
    ),
    "moving_shape": lambda facts: (
        f"changes with every step: {_named(facts.moving_inputs)}; patch the model with --lift-sequence-lengths"
        if facts.moving_inputs
        else None
    ),
    "host_resident_output": lambda facts: None if facts.logits_on_device else "the logits go through the host",
}
"""What can speak against a capture: name → why, or None. The first that speaks is the reason."""


def decline_reason(facts: StepFacts) -> str | None:
    """Return the predicate that forbids a capture and its explanation, or None if nothing does.

    Raises:
        ConfigError: graphs are demanded (`graph="on"`) and not possible.
    """
    for name, predicate in PREDICATES.items():
        explanation = predicate(facts)
        if explanation is not None:
            if facts.mode is GraphMode.ON:
                raise ConfigError(f"graph=on, but the step cannot be captured ({name}: {explanation}); use graph=auto")
            return f"{name}: {explanation}"
    return None


class Graph(Protocol):
    """A captured graph."""

    def launch(self, stream: Any, /) -> None:
        """Queue the captured work."""

    def close(self) -> None:
        """Release it; work in flight goes on."""


class Capture(Protocol):
    """A recording; it has its graph when it ended without an error."""

    @property
    def graph(self) -> Graph:
        """What was recorded."""


class CaptureStream(Protocol):
    """A stream whose work can be captured: `cuda.Stream`."""

    def capture(self) -> AbstractContextManager[Capture]:
        """Record what the block queues instead of running it."""


class CapturedStep:
    """Runs a decode step, plainly or as a captured graph. The owner of the graph counters of `stats`.

    Args:
        run_step: queues one step's work on `stream`, all of it, with the present bindings.
        stream: what it is captured from; None where nothing can be captured.
        signature: the cache's signature; equal results mean equal bindings.
        stats: where it counts.
        declined: why no step may be captured (`decline_reason`), or None.
    """

    def __init__(
        self,
        run_step: Callable[[], None],
        stream: CaptureStream | None,
        signature: Callable[[], object],
        stats: Stats,
        declined: str | None = None,
    ) -> None:
        self._run_step = run_step
        self._stream = stream
        self._signature = signature
        self._stats = stats
        self._graph: Graph | None = None
        self._bound: object = None
        self._warm_ups = 0
        stats.decline_reason = declined

    def __call__(self) -> None:
        """Run the step."""
        signature = self._signature()
        if signature != self._bound:
            self._rebind(signature, "first_binding" if self._bound is None else "signature_changed")
        if self._stream is None or self._stats.decline_reason is not None:
            self._run_step()
        elif self._graph is not None:
            self._replay(self._graph, self._stream)
        elif self._warm_ups < WARM_UP_RUNS:
            self._warm_ups += 1
            self._run_step()
        else:
            self._capture(self._stream)

    def grew(self, event: GrowthEvent) -> None:
        """Decide what a growth means for the graph: kept if no binding changed and no byte moved, else given up."""
        if event.kept and event.bytes_moved == 0:
            self._stats.growth_keeps += 1
            self._stats.keep_reasons["bindings_unchanged"] += 1
            return
        self._drop_graph()
        self._bound = event  # no signature equals it: the next step binds anew, even to the same addresses

    def close(self) -> None:
        """Release the graph."""
        self._drop_graph()

    def _capture(self, stream: CaptureStream) -> None:
        try:
            with stream.capture() as capture:
                self._run_step()
        except Exception as error:  # whatever it was, the step has not run yet: if it must fail, it fails plainly
            self._stats.decline_reason = f"capture_failed: {error}"
            self._run_step()
            return
        self._graph = capture.graph
        self._stats.captures += 1
        self._replay(self._graph, stream)

    def _replay(self, graph: Graph, stream: CaptureStream) -> None:
        graph.launch(stream)
        self._stats.replays += 1

    def _rebind(self, signature: object, reason: str) -> None:
        self._drop_graph()
        self._bound = signature
        if self._stream is not None and self._stats.decline_reason is None:
            self._stats.invalidations += 1
            self._stats.invalidation_reasons[reason] += 1

    def _drop_graph(self) -> None:
        self._warm_ups = 0
        if self._graph is not None:
            self._graph.close()
            self._graph = None
