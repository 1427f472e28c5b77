"""Patching a model directory: open, check, change the graph, publish a new directory. Weights are never parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx_ir as ir

from onnx_kv.layout import KvLayout
from onnx_kv.metadata import FILE_NAME, follow_graph
from onnx_kv.metadata.yaml_file import read_text
from onnx_kv.model_dir import ModelDir
from onnx_kv.model_dir.external_data import check_external_data
from onnx_kv.model_dir.faithful import check_faithful, model_bytes
from onnx_kv.model_dir.publish import Contents, check_output, publish
from onnx_kv.model_dir.tree import read_tree
from onnx_kv.passes import GraphPass, LastTokenLogits, LiftSequenceLengths, PassOutcome, StampKvLayout

_LINK_NOTE = (
    "the weights are hard links: writing into one directory's data file changes the other's, "
    "and onnx's checker refuses linked files; ONNX Runtime loads them"
)


@dataclass(frozen=True)
class PatchReport:
    """What `patch_model` did, or would do where `dry_run`.

    `rewritten` are the files that differ from the source's, `copied_bytes` and `linked_bytes` the sizes of those that
    do not. `notes` are for the user.
    """

    source: Path
    output: Path
    layout: KvLayout
    dry_run: bool
    passes: tuple[PassOutcome, ...]
    rewritten: tuple[str, ...]
    copied_bytes: int
    linked_bytes: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types; the layout is spelled as on the command line."""
        return asdict(self) | {
            "source": str(self.source),
            "output": str(self.output),
            "layout": self.layout.cli_name,
            "changed": any(outcome.changes for outcome in self.passes),
        }


Progress = Callable[[int, int], object]
"""Told (bytes copied so far, bytes in all)."""


def patch_model(
    source: str | Path,
    output: str | Path,
    layout: KvLayout | str,
    *,
    link: bool = False,
    force: bool = False,
    dry_run: bool = False,
    lift_sequence_lengths: bool | None = None,
    last_token_logits: bool | None = None,
    on_progress: Progress | None = None,
) -> PatchReport:
    """Write a copy of the model directory `source` to `output` whose KV cache has another layout.

    The output appears complete or not at all; the source is never written. A second run gives identical bytes, and a
    model that already is as wanted is copied byte for byte. An `inference_metadata.yaml` follows the graph.

    Args:
        source: A model directory as ONNX Runtime GenAI's exporters write it.
        output: The directory to write; its parent exists.
        layout: The layout, or its name, of all caches. Head-major is what stock ONNX Runtime can load.
        link: Hard-link the model's external data instead of copying it.
        force: Replace an `output` that is a model directory, in one step.
        dry_run: Check and report everything, write nothing.
        lift_sequence_lengths: True to take sequence lengths as inputs in place of the attention mask. False to undo it,
            which is refused. None leaves it.
        last_token_logits: True to compute the logits of the last position only, False to undo it, None leaves it.
        on_progress: Told how far the copy is.

    Raises:
        ModelDirError: the source cannot be read safely or the output not be written.
        PatchRefusedError: a pass does not fit the model; names every node at fault.
        MetadataError: the directory's `inference_metadata.yaml` cannot be made to follow.
        ConfigError: no layout has this name.
    """
    layout = layout if isinstance(layout, KvLayout) else KvLayout.parse(layout)
    model_dir = ModelDir.open(source)
    target = check_output(model_dir, Path(output), force=force)
    proto = model_dir.read_proto()
    data_files = check_external_data(model_dir, proto)
    model = model_dir.build_graph(proto)
    check_faithful(model_dir, proto, model)
    chosen = chosen_passes(model_dir, layout, lift_sequence_lengths, last_token_logits)
    outcomes = tuple(graph_pass(model).outcome for graph_pass in chosen)
    rewritten = {model_dir.model_path: model_bytes(model, proto)} if any(o.changes for o in outcomes) else {}
    rewritten |= _followed_metadata(model_dir, model)
    contents = Contents(read_tree(model_dir), rewritten, data_files if link else frozenset())
    copied = sum(file.size for file in contents.files())
    linked = sum(file.size for file in contents.links())
    if not dry_run:
        publish(contents, target, force=force, on_bytes=_counter(copied + linked, on_progress))
    return PatchReport(
        source=model_dir.path,
        output=Path(output),
        layout=layout,
        dry_run=dry_run,
        passes=outcomes,
        rewritten=tuple(str(path) for path in rewritten),
        copied_bytes=copied,
        linked_bytes=linked,
        notes=(_LINK_NOTE,) if linked else (),
    )


def chosen_passes(
    model_dir: ModelDir, layout: KvLayout, lift_sequence_lengths: bool | None, last_token_logits: bool | None
) -> Iterator[GraphPass]:
    """Yield the passes that arguments of `patch_model` ask for, in the order in which they are applied."""
    yield StampKvLayout(layout)
    if lift_sequence_lengths is not None:
        yield LiftSequenceLengths(undo=not lift_sequence_lengths)
    if last_token_logits is not None:
        yield LastTokenLogits(model_dir.output_name("logits"), undo=not last_token_logits)


def _followed_metadata(model_dir: ModelDir, model: ir.Model) -> dict[PurePosixPath, bytes]:
    """The directory's metadata file, where it has one that the patched graph contradicts."""
    file = model_dir.path / FILE_NAME
    if not file.exists():
        return {}
    text = read_text(file)
    followed = follow_graph(text, model, file)
    return {} if followed == text else {PurePosixPath(FILE_NAME): followed.encode()}


def _counter(total: int, on_progress: Progress | None) -> Callable[[int], object]:
    """A receiver of advances that tells `on_progress` their sum."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    return advance
