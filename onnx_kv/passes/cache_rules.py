"""What rules out changing a model's KV layout, whatever the layout: each rule yields its refusals as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir

from onnx_kv.errors import ModelDirError
from onnx_kv.graph import (
    GQA,
    PAST_KEY,
    PAST_VALUE,
    PRESENT_KEY,
    PRESENT_VALUE,
    CacheLayer,
    NodeCall,
    cache_layer,
    has_cache,
    is_gqa,
    kv_layout,
    reads,
)
from onnx_kv.layout import KvLayout

_K_SCALE, _V_SCALE, _OUTPUT_QK = 12, 13, 3
_ELEMENT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

# Other operators that can keep a cache: the input slots of their past and the output slots of their present.
_OTHER_CACHES = {
    ("", "Attention"): ((4, 5), (1, 2)),
    ("com.microsoft", "Attention"): ((4,), (1,)),
    ("com.microsoft", "MultiHeadAttention"): ((6, 7), (1, 2)),
    ("com.microsoft", "DecoderAttention"): ((6, 7), (1, 2)),
    ("com.microsoft", "DecoderMaskedSelfAttention"): ((4,), (1,)),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): ((5, 6), (1, 2)),
    ("com.microsoft", "SparseAttention"): ((3, 4), (1, 2)),
    ("com.microsoft", "PagedAttention"): ((3, 4), (1, 2)),
}

# These read the shape of a cache, which is the same in every layout, and no byte of it.
_SHAPE_READERS = (("", "Shape"), ("", "Size"))


def operator_problems(calls: Sequence[NodeCall]) -> Iterator[str]:
    """Yield the attention nodes whose operator or attributes no layout is made for."""
    for call in calls:
        pasts, presents = _OTHER_CACHES.get((call.node.domain, call.node.op_type), ((), ()))
        if any(call.input(slot) for slot in pasts) or any(call.output(slot) for slot in presents):
            yield f"node {call.name!r}: {call.node.op_type} keeps a cache and is not {GQA[1]}"
        if is_gqa(call.node):
            yield from (f"node {call.name!r}: {problem}" for problem in _gqa_problems(call))


def cache_problems(model: ir.Model, calls: Sequence[NodeCall]) -> Iterator[str]:
    """Yield the caches whose place is not known, and everything that would read one as head-major."""
    roles: dict[ir.Value, tuple[str, CacheLayer]] = {}
    for call in calls:
        if is_gqa(call.node):
            try:
                yield from _own_problems(model, call, roles)
            except ModelDirError as error:
                yield str(error)
    for call in calls:
        operator = (call.node.domain, call.node.op_type)
        for slot, value in reads(model, call):
            as_attention = is_gqa(call.node) and slot in (PAST_KEY, PAST_VALUE)
            if value in roles and not as_attention and operator not in _SHAPE_READERS:
                role, layer = roles[value]
                yield f"node {call.name!r} ({call.node.op_type}) reads the {role} {value.name!r} of node {layer.node!r}"


def _gqa_problems(call: NodeCall) -> Iterator[str]:
    for name in ("k_quant_type", "v_quant_type"):
        attribute = call.attribute(name)
        if attribute is not None and attribute.value not in ("", "NONE"):
            yield f"its cache is quantised ({name}={attribute.value})"
    if call.integer("kv_cache_bit_width", 0):
        yield f"its cache is quantised (kv_cache_bit_width={call.integer('kv_cache_bit_width', 0)})"
    for slot, name in ((_K_SCALE, "k_scale"), (_V_SCALE, "v_scale")):
        if call.input(slot) is not None:
            yield f"its cache is quantised (input {name})"
    if not call.integer("causal", 1):
        yield "it is not causal (causal=0)"
    if call.integer("qk_output", 0) or call.output(_OUTPUT_QK) is not None:
        yield "it outputs the product of query and key (qk_output)"


def _own_problems(model: ir.Model, call: NodeCall, roles: dict[ir.Value, tuple[str, CacheLayer]]) -> Iterator[str]:
    """Yield what is wrong with one node's cache, and note the role of each of its values in `roles`."""
    kv_layout(call)
    if not has_cache(call):
        return
    layer = cache_layer(model, call)
    for role, value in (
        ("past key", call.input(PAST_KEY)),
        ("past value", call.input(PAST_VALUE)),
        ("present key", call.output(PRESENT_KEY)),
        ("present value", call.output(PRESENT_VALUE)),
    ):
        if value is None:
            continue
        if value.dtype not in _ELEMENT_TYPES:
            yield f"node {call.name!r}: its cache is quantised ({value.name!r} is {value.dtype})"
        elif str(value.dtype.numpy()) != layer.dtype:
            yield f"node {call.name!r}: {value.name!r} is {value.dtype}, but its past key {layer.dtype}"
        known_role, known = roles.setdefault(value, (role, layer))
        if known_role != role or _cache_of(known) != _cache_of(layer):
            yield f"node {call.name!r} reads {value.name!r} otherwise than node {known.node!r} does"


def _cache_of(layer: CacheLayer) -> CacheLayer:
    """What two nodes must agree about to share a cache."""
    return replace(layer, node="", query_heads=0, window=None, layout=KvLayout.HEAD_MAJOR)
