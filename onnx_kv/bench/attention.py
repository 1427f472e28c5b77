"""One attention node as benchmarks see it: shapes, calls, the bytes and operations of a call, a model of the node.

`attention_cpu.py` and `attention_cuda.py` time it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.errors import ConfigError
from onnx_kv.layout import KV_LAYOUT_ATTRIBUTE, TOKEN_OFFSET_ATTRIBUTE, TOKEN_STRIDE_ATTRIBUTE, KvLayout

Dims = list[str | int | None]

ORT = "onnxruntime"
"""Name of the rival in results: ONNX Runtime's own node."""


@dataclass(frozen=True)
class Shape:
    """A model's attention; `layers` is how many caches a benchmark goes through in turn."""

    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int = 1

    @classmethod
    def parse(cls, text: str, layers: int = 1) -> Shape:
        """Read query heads, KV heads and head size, `32/8/128`.

        Raises:
            ConfigError: anything else, or query heads that KV heads cannot share.
        """
        match = re.fullmatch(r"(\d+)/(\d+)/(\d+)", text)
        q_heads, kv_heads, head_dim = map(int, match.groups()) if match else (0, 0, 0)
        if min(q_heads, kv_heads, head_dim) < 1 or q_heads % kv_heads:
            raise ConfigError(
                f"{text!r} is no attention; write query heads, KV heads that divide them, and head size, as in 32/8/128"
            )
        return cls(q_heads, kv_heads, head_dim, layers)

    @property
    def name(self) -> str:
        """Query heads, KV heads, head size."""
        return f"{self.q_heads}/{self.kv_heads}/{self.head_dim}"


@dataclass(frozen=True)
class Case:
    """What a call does: `totals` are the rows' tokens after it, of which `q_len` are new; `capacity` slots a row."""

    name: str
    totals: tuple[int, ...]
    q_len: int
    capacity: int

    @classmethod
    def decode(cls, context: int) -> Case:
        """One new token, which is the last of `context`."""
        return cls(f"decode-{context}", (context,), 1, context)

    @classmethod
    def prefill(cls, length: int) -> Case:
        """A prompt of `length` tokens and no past."""
        return cls(f"prefill-{length}", (length,), length, length)


@dataclass
class Measured:
    """Microseconds a call of each provider, interleaved; what could not be measured is in `missing` with its reason."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def cache_bytes(shape: Shape, case: Case, element_size: int) -> int:
    """Bytes of all layers' caches: the same in every layout."""
    return 2 * shape.layers * len(case.totals) * case.capacity * shape.kv_heads * shape.head_dim * element_size


def read_bytes(shape: Shape, case: Case, element_size: int) -> int:
    """K and V that one call of one layer must read."""
    return 2 * sum(case.totals) * shape.kv_heads * shape.head_dim * element_size


def flops(shape: Shape, case: Case) -> float:
    """Operations of one causal prefill without a past."""
    return sum(4 * shape.q_heads * shape.head_dim * total * total / 2 for total in case.totals)


def rotary_tables(shape: Shape, case: Case, dtype: npt.DTypeLike) -> dict[str, npt.NDArray[np.generic]]:
    """Cosines and sines of rotary embedding with base 10⁶, `[capacity, head_dim / 2]`, by input name."""
    half = shape.head_dim // 2
    angles = np.arange(case.capacity)[:, None] * 1e6 ** -(np.arange(half) / half)
    return {"cos_cache": np.cos(angles).astype(dtype), "sin_cache": np.sin(angles).astype(dtype)}


def node_model(shape: Shape, dtype: npt.DTypeLike, layout: KvLayout | None) -> bytes:
    """A model of one node, patched to `layout` as the only layer, or as ONNX Runtime's own operator takes it."""
    import onnx  # slow to load, and needed by benchmarks alone
    from onnx import TensorProto, helper

    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    cache: Dims = ["b", shape.kv_heads, "c", shape.head_dim]
    wide: Dims = ["b", "s", shape.q_heads * shape.head_dim]
    narrow: Dims = ["b", "s", shape.kv_heads * shape.head_dim]
    rotary: Dims = ["r", shape.head_dim // 2]
    ports = {"query": wide, "key": narrow, "value": narrow, "past_key": cache, "past_value": cache}
    inputs = [helper.make_tensor_value_info(name, element, dims) for name, dims in ports.items()]
    inputs.append(helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, ["b"]))
    inputs.append(helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, [1]))
    inputs += [helper.make_tensor_value_info(name, element, rotary) for name in ("cos_cache", "sin_cache")]
    outputs = {"output": wide, "present_key": cache, "present_value": cache}
    attributes: dict[str, Any] = {} if layout is None else {KV_LAYOUT_ATTRIBUTE: int(layout)}
    if layout is not None and layout.interleaved:
        attributes[TOKEN_STRIDE_ATTRIBUTE] = 2 * shape.kv_heads * shape.head_dim
        attributes[TOKEN_OFFSET_ATTRIBUTE] = 0
    node = helper.make_node(
        "GroupQueryAttention",
        [value.name for value in inputs],
        list(outputs),
        domain="com.microsoft",
        num_heads=shape.q_heads,
        kv_num_heads=shape.kv_heads,
        do_rotary=1,
        **attributes,
    )
    out = [helper.make_tensor_value_info(name, element, dims) for name, dims in outputs.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "node", inputs, out)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())
