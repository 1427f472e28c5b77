"""What a model directory is, seen through this project: attention, cache, layout, passes done and possible.

Nothing is written, and the weights are only looked at from outside: where they are and whether they are complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onnx_kv.errors import ModelDirError, PatchRefusedError
from onnx_kv.graph import CacheLayer, attention_layers
from onnx_kv.layout import KvLayout
from onnx_kv.model_dir import ModelDir
from onnx_kv.model_dir.external_data import check_external_data
from onnx_kv.passes import GraphPass, LastTokenLogits, LiftSequenceLengths, StampKvLayout, applied_passes


@dataclass(frozen=True)
class PassState:
    """Whether a pass could be applied: `reasons` tell what it would change, what was already so, or why it is refused.

    `argument` is the layout of `stamp_kv_layout`, empty for other passes.
    """

    name: str
    argument: str
    state: Literal["possible", "already so", "refused"]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """What `inspect_model` found.

    `layers` is empty, and `attention_problem` says why, where the graph's attention cannot be described. `weight_files`
    are the external data files, `weight_bytes` their size; `passes` are those recorded in the model.
    """

    path: Path
    model_file: Path
    ir_version: int
    opsets: dict[str, int]
    weight_files: tuple[Path, ...]
    weight_bytes: int
    layers: tuple[CacheLayer, ...]
    attention_problem: str | None
    passes: tuple[str, ...]
    states: tuple[PassState, ...]

    @property
    def layout(self) -> KvLayout | None:
        """The layout of all layers; None where they have none or several."""
        layouts = {layer.layout for layer in self.layers}
        return layouts.pop() if len(layouts) == 1 else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that all layers together cache for one token of one sequence."""
        return sum(2 * layer.shape.width * np.dtype(layer.dtype).itemsize for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """The findings as JSON types; layouts are spelled as on the command line."""
        layers = [asdict(layer) | {"layout": layer.layout.cli_name} for layer in self.layers]
        return asdict(self) | {
            "path": str(self.path),
            "model_file": str(self.model_file),
            "weight_files": [str(file) for file in self.weight_files],
            "layers": layers,
            "layout": self.layout.cli_name if self.layout is not None else None,
            "bytes_per_token": self.bytes_per_token,
        }


def inspect_model(path: str | Path) -> Inspection:
    """Describe the model directory `path`.

    Raises:
        ModelDirError: it is no model directory, or its weights are not where the model says.
    """
    model_dir = ModelDir.open(path)
    proto = model_dir.read_proto()
    files = tuple(sorted(check_external_data(model_dir, proto)))
    model = model_dir.build_graph(proto)
    problem = None
    layers: tuple[CacheLayer, ...] = ()
    try:
        layers = attention_layers(model)
    except ModelDirError as error:
        problem = str(error)
    return Inspection(
        path=model_dir.path,
        model_file=model_dir.model_file,
        ir_version=model.ir_version,
        opsets=dict(model.opset_imports),
        weight_files=files,
        weight_bytes=sum(file.stat().st_size for file in files),
        layers=layers,
        attention_problem=problem,
        passes=applied_passes(model),
        states=tuple(_states(model_dir, model)),
    )


def _states(model_dir: ModelDir, model: ir.Model) -> Iterator[PassState]:
    for layout in KvLayout:
        yield _state(StampKvLayout(layout), layout.cli_name, model)
    yield _state(LiftSequenceLengths(), "", model)
    yield _state(LastTokenLogits(model_dir.output_name("logits")), "", model)


def _state(graph_pass: GraphPass, argument: str, model: ir.Model) -> PassState:
    try:
        plan = graph_pass.plan(model)
    except PatchRefusedError as error:
        return PassState(graph_pass.name, argument, "refused", error.reasons)
    if plan.changes:
        return PassState(graph_pass.name, argument, "possible", plan.changes)
    return PassState(graph_pass.name, argument, "already so", plan.notes)
