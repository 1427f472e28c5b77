"""Stamp a KV-cache layout on every GroupQueryAttention node of a model, or on none.

The layout is the node attribute `kv_layout`; the interleaved layouts also get `kv_token_stride` and `kv_token_offset`
(elements, from `onnx_kv.layout`; layers count in the order of the graph's inputs). Head-major has no attribute, so that
going back to it gives a model for stock ONNX Runtime again. Shapes stay `[batch, kv_heads, capacity, head_dim]`.

`sliding_window_cache=1`, a cache of the window's size only, is cleared and stays cleared in every layout: a layer gets
its full address range, and `local_window_size` goes on limiting what it sees.

Refused, by node: a model whose nodes have different layouts; a cache that two nodes read differently, or that anything
but attention reads; a quantised cache; bidirectional attention; output of the q·k product; attention operators that
keep a cache and are not GroupQueryAttention; a cache that does not lead to the model's inputs and outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import onnx_ir as ir

from onnx_kv.errors import PatchRefusedError
from onnx_kv.graph import GQA, PAST_KEY, CacheLayer, NodeCall, attention_layers, is_gqa, kv_layout, node_calls
from onnx_kv.layout import (
    KV_LAYOUT_ATTRIBUTE,
    TOKEN_OFFSET_ATTRIBUTE,
    TOKEN_STRIDE_ATTRIBUTE,
    KvLayout,
    token_offset,
    token_width,
)
from onnx_kv.passes.base import GraphPass, Plan, count
from onnx_kv.passes.cache_rules import cache_problems, operator_problems

SLIDING_WINDOW_CACHE = "sliding_window_cache"

_ATTRIBUTES = (KV_LAYOUT_ATTRIBUTE, TOKEN_STRIDE_ATTRIBUTE, TOKEN_OFFSET_ATTRIBUTE)


class StampKvLayout(GraphPass):
    """Give every GroupQueryAttention node of the model one layout."""

    name = "stamp_kv_layout"

    def __init__(self, layout: KvLayout) -> None:
        """Prepare to stamp `layout`; head-major removes the stamp."""
        self.layout = layout

    @property
    def leaves_mark(self) -> bool:
        """False for head-major, which is what exporters write."""
        return self.layout is not KvLayout.HEAD_MAJOR

    def plan(self, model: ir.Model) -> Plan:
        """Decide which attributes every node gets.

        Raises:
            PatchRefusedError: see the module's text.
        """
        calls = list(node_calls(model))
        attention = [call for call in calls if is_gqa(call.node)]
        problems = [*operator_problems(calls), *cache_problems(model, calls)]
        if not attention:
            problems.append(f"it has no {GQA[0]}::{GQA[1]} node")
        problems = problems or list(_mixed_layouts(attention))
        if problems:
            raise PatchRefusedError(self.name, problems)
        layers = attention_layers(model)
        wanted = [_stamp(self.layout, call, layers) for call in attention]
        problems = [*_wrong_strides(layers), *self._inexpressible(attention, wanted, layers)]
        if problems:
            raise PatchRefusedError(self.name, problems)
        return self._plan(attention, {call.node: stamp for call, stamp in zip(attention, wanted, strict=True)})

    def _plan(self, attention: Sequence[NodeCall], stamps: Mapping[ir.Node, dict[str, int]]) -> Plan:
        old = kv_layout(attention[0])
        windowed = {call.node for call in attention if call.integer(SLIDING_WINDOW_CACHE, 0)}
        changes = []
        if old is not self.layout:
            changes.append(f"{count(len(stamps), 'node')}: {old.cli_name} to {self.layout.cli_name}")
        if windowed:
            changes.append(f"{count(len(windowed), 'node')}: {SLIDING_WINDOW_CACHE}=1 cleared, local_window_size stays")
        return Plan(tuple(changes), (), partial(_apply, stamps, windowed))

    def _inexpressible(
        self, attention: Sequence[NodeCall], wanted: Sequence[dict[str, int]], layers: Sequence[CacheLayer]
    ) -> Iterator[str]:
        """Yield what the layout cannot express in this model."""
        first: dict[ir.Node, dict[str, int]] = {}
        for call, stamp in zip(attention, wanted, strict=True):
            if first.setdefault(call.node, stamp) != stamp:
                yield (
                    f"node {call.name!r} is in a function that several layers call, and in {self.layout.cli_name} each "
                    f"needs a {TOKEN_OFFSET_ATTRIBUTE} of its own; inline the function first"
                )
        if self.layout is KvLayout.TOKEN_MAJOR and len({layer.dtype for layer in layers}) > 1:
            yield f"its layers have different element types, which {self.layout.cli_name} cannot keep in one token"


def _stamp(layout: KvLayout, call: NodeCall, layers: Sequence[CacheLayer]) -> dict[str, int]:
    """The attributes that a node must have in `layout`."""
    if layout is KvLayout.HEAD_MAJOR:
        return {}
    stamp = {KV_LAYOUT_ATTRIBUTE: int(layout)}
    past_key = call.input(PAST_KEY)
    if layout.interleaved and past_key is not None:
        index = next(i for i, layer in enumerate(layers) if layer.past_key == past_key.name)
        stamp |= _strides(layout, layers, index)
    return stamp


def _strides(layout: KvLayout, layers: Sequence[CacheLayer], index: int) -> dict[str, int]:
    shapes = [layer.shape for layer in layers]
    return {
        TOKEN_STRIDE_ATTRIBUTE: token_width(layout, shapes, index),
        TOKEN_OFFSET_ATTRIBUTE: token_offset(layout, shapes, index),
    }


def _mixed_layouts(attention: Sequence[NodeCall]) -> Iterator[str]:
    """Yield the nodes whose layout is not that of most."""
    layouts = [kv_layout(call) for call in attention]
    usual = Counter(layouts).most_common(1)[0][0]
    for call, layout in zip(attention, layouts, strict=True):
        if layout is not usual:
            yield f"node {call.name!r} is {layout.cli_name}, the others are {usual.cli_name}: a half-patched model"


def _wrong_strides(layers: Sequence[CacheLayer]) -> Iterator[str]:
    """Yield interleaved nodes whose strides are not those of their layout."""
    for index, layer in enumerate(layers):
        found = {TOKEN_STRIDE_ATTRIBUTE: layer.token_stride, TOKEN_OFFSET_ATTRIBUTE: layer.token_offset}
        if layer.layout.interleaved and found != (wanted := _strides(layer.layout, layers, index)):
            yield f"node {layer.node!r} has {found} where {layer.layout.cli_name} needs {wanted}: a half-patched model"


def _apply(stamps: Mapping[ir.Node, dict[str, int]], windowed: set[ir.Node]) -> None:
    for node, stamp in stamps.items():
        for name in _ATTRIBUTES:
            node.attributes.pop(name, None)
        for name, value in stamp.items():
            node.attributes.add(ir.AttrInt64(name, value))
    for node in windowed:
        del node.attributes[SLIDING_WINDOW_CACHE]
