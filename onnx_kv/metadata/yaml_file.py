"""Reading `inference_metadata.yaml`, which a hand may have written: types, required fields and places are checked.

Keys that are not ours are left alone; other tools keep theirs in the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from onnx_kv.errors import MetadataError
from onnx_kv.layout import KvLayout
from onnx_kv.metadata.block import Block, show
from onnx_kv.metadata.json_file import read_bytes
from onnx_kv.metadata.schema import FILE_NAME, MAX_LAYERS, MAX_TOKENS, Attention, Metadata
from onnx_kv.metadata.yaml_text import LAYOUT_FIELD


def load_metadata(model_dir: str | Path) -> Metadata:
    """Read the metadata file of a model directory. The graph is not asked; `check.disagreements` does that.

    Raises:
        MetadataError: no such file, not YAML (with line and column), a field missing or of the wrong type.
    """
    file = Path(model_dir) / FILE_NAME
    return parse_metadata(read_text(file), file)


def read_text(file: Path) -> str:
    """Return the text of a metadata file.

    Raises:
        MetadataError: it cannot be read or is not UTF-8.
    """
    try:
        return read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MetadataError(f"{file}: not UTF-8 text: {error}") from error


def parse_metadata(text: str, file: Path) -> Metadata:
    """Read metadata from text; `file` is named in errors.

    Raises:
        MetadataError: as `load_metadata`.
    """
    root = Block(file, "", parse(text, file)[1])
    model = _block(root, "model")
    io = _block(model, "io")
    kv_inputs, kv_outputs = _names(io, "kv_inputs"), _names(io, "kv_outputs")
    if len(kv_inputs) != len(kv_outputs) or len(kv_inputs) % 2:
        raise io.error(
            "kv_outputs",
            f"{len(kv_outputs)} outputs for {len(kv_inputs)} kv_inputs; both list a key, then a value, for each layer",
        )
    layers = len(kv_inputs) // 2
    return Metadata(
        max_sequence_length=_count(model, "max_sequence_length"),
        token_input=_text(io, "token_input"),
        logits_output=_text(io, "logits_output"),
        kv_inputs=kv_inputs,
        kv_outputs=kv_outputs,
        attention_mask_input=io.text("attention_mask_input"),
        position_ids_input=io.text("position_ids_input"),
        seqlens_k_input=io.text("seqlens_k_input"),
        total_sequence_length_input=io.text("total_sequence_length_input"),
        kv_layout=_layout(io),
        attention=_attention(block, layers) if (block := model.block("attention")) else None,
    )


def parse(text: str, file: Path) -> tuple[yaml.MappingNode, dict[Any, Any]]:
    """Parse a YAML document whose top level is a mapping: its nodes, and what they say.

    Raises:
        MetadataError: not one YAML document, an alias, a key twice in a mapping; with line and column where YAML gives
            them.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise MetadataError(f"{file}{place}: not YAML that can be read: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MetadataError(f"{file}: not YAML that can be read: {error}") from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(data, dict):
        raise MetadataError(f"{file}: the top level is not a mapping")
    return node, data


class _Loader(yaml.SafeLoader):
    """Refuses what PyYAML takes silently: the last of two equal keys, and aliases, which can unfold without bound."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(problem="aliases are not read", problem_mark=mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    problem = f"the key {key.value!r} stands here a second time"
                    raise yaml.composer.ComposerError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def _block(parent: Block, key: str) -> Block:
    block = parent.block(key)
    if block is None:
        raise parent.missing(key)
    return block


def _text(block: Block, key: str) -> str:
    text = block.text(key)
    if text is None:
        raise block.missing(key)
    return text


def _count(block: Block, key: str) -> int:
    count = block.count(key, MAX_TOKENS)
    if count is None:
        raise block.missing(key)
    return count


def _array(block: Block, key: str) -> list[Any]:
    value = block.values.get(key)
    if value is None:
        raise block.missing(key)
    if not isinstance(value, list):
        raise block.mistyped(key, "a list")
    if not value:
        raise block.error(key, "an empty list")
    return value


def _names(io: Block, key: str) -> tuple[str, ...]:
    """A list of port names; each goes through the same checks as a single one."""
    names = _array(io, key)
    if len(names) > 2 * MAX_LAYERS:
        raise io.error(key, f"{len(names):,} entries; at most {2 * MAX_LAYERS:,} are read")
    entries = Block(io.file, io.where(key), {str(index): name for index, name in enumerate(names)})
    return tuple(_text(entries, index) for index in entries.values)


def _layout(io: Block) -> KvLayout:
    name = io.text(LAYOUT_FIELD)
    layouts = {layout.yaml_name: layout for layout in KvLayout}
    if name is None:
        return KvLayout.HEAD_MAJOR
    if name not in layouts:
        raise io.error(LAYOUT_FIELD, f"{show(name)} is no layout; use one of: {', '.join(layouts)}")
    return layouts[name]


def _attention(block: Block, layers: int) -> Attention:
    windows: list[int | None] = [None] * layers
    if "sliding_window" in block:
        windowed = _array(block, "sliding_window_layers")
        sizes = _per_layer(block, "sliding_window", len(windowed))
        for layer, size in zip(windowed, sizes, strict=True):
            if type(layer) is not int or not 0 <= layer < layers:
                raise block.error("sliding_window_layers", f"{show(layer)} is none of the layers 0 to {layers - 1}")
            windows[layer] = size
    return Attention(
        query_heads=_per_layer(block, "num_attention_heads", layers),
        kv_heads=_per_layer(block, "num_key_value_heads", layers),
        head_sizes=_per_layer(block, "head_size", layers),
        windows=tuple(windows),
    )


def _per_layer(block: Block, key: str, layers: int) -> tuple[int, ...]:
    """One number for all layers, or a list with one for each."""
    values = block.values.get(key)
    if not isinstance(values, list):
        return (_count(block, key),) * layers
    if len(values) != layers:
        raise block.error(key, f"{len(values)} numbers for {layers} layers")
    entries = Block(block.file, block.where(key), {str(index): value for index, value in enumerate(values)})
    return tuple(_count(entries, index) for index in entries.values)
