"""Runs one GroupQueryAttention node in ONNX Runtime on the CPU: the op library's in any layout, or ONNX Runtime's own.

Everything is bound by address, as the runtime does it: past and present may be one buffer, and the bindings of an
interleaved layout lie inside one array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnx_kv.layout import KV_LAYOUT_ATTRIBUTE, TOKEN_OFFSET_ATTRIBUTE, TOKEN_STRIDE_ATTRIBUTE
from onnx_kv.ops import library_path
from tests.support.gqa_reference import GqaAttributes, GqaInputs, GqaOutputs, cache_shape, cache_view

Array = NDArray[Any]

ONNX_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
}
LAYERS, LAYER = 3, 1
"""Of a token-major cache: how many layers share it, and which one a call works on."""

INPUTS = (
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
    "position_ids",
    "attention_bias",
    "head_sink",
    "k_scale",
    "v_scale",
    "q_norm_weight",
    "k_norm_weight",
    "query_seqlens",
)
OUTPUTS = ("output", "present_key", "present_value")


@dataclass(frozen=True)
class Way:
    """How a call is made; `layout` None leaves the attribute out, `library` False runs ONNX Runtime's own operator."""

    layout: int | None = 0
    packed: bool = False
    two_buffers: bool = False
    lengths_column: bool = False
    threads: int = 1
    library: bool = True
    total: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


def input_arrays(call: GqaInputs, way: Way) -> dict[str, Array]:
    """Every input but the past, by name, as the node takes it."""
    batch, q_len = call.query.shape[:2]
    flat = {name: getattr(call, name).reshape(batch, q_len, -1) for name in ("query", "key", "value")}
    if way.packed:
        flat = {"query": np.concatenate(list(flat.values()), axis=2)}
    lengths = np.asarray(call.seqlens_k, np.int32).reshape((batch, 1) if way.lengths_column else (batch,))
    total = int(np.max(call.seqlens_k)) + 1 if way.total is None else way.total
    arrays: dict[str, Array] = {**flat, "seqlens_k": lengths, "total_sequence_length": np.array([total], np.int32)}
    for name in INPUTS[7:]:
        array = getattr(call, name, None)
        if array is not None:
            kind = {"position_ids": np.int64, "query_seqlens": np.int32}.get(name, call.query.dtype)
            arrays[name] = np.asarray(array, kind)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def attributes_of(node: GqaAttributes, call: GqaInputs, way: Way) -> dict[str, Any]:
    """The node's attributes, those that have their default left out."""
    attributes: dict[str, Any] = {"num_heads": node.num_heads, "kv_num_heads": node.kv_num_heads}
    if node.scale is not None:
        attributes["scale"] = float(node.scale)
    if node.softcap:
        attributes["softcap"] = float(node.softcap)
    if node.local_window_size > 0:
        attributes["local_window_size"] = node.local_window_size
    for name in ("do_rotary", "rotary_interleaved", "smooth_softmax"):
        if getattr(node, name):
            attributes[name] = 1
    if call.q_norm_weight is not None:
        attributes |= {"q_norm_epsilon": node.q_norm_epsilon, "k_norm_epsilon": node.k_norm_epsilon}
    if way.layout is not None:
        attributes[KV_LAYOUT_ATTRIBUTE] = way.layout
    if way.layout in (2, 3):
        token = 2 * node.kv_num_heads * call.query.shape[3]
        layers = LAYERS if way.layout == 3 else 1
        attributes |= {TOKEN_STRIDE_ATTRIBUTE: layers * token, TOKEN_OFFSET_ATTRIBUTE: token if way.layout == 3 else 0}
    return attributes | way.attributes


def node_model(
    inputs: dict[str, tuple[int, list[Any]]],
    attributes: dict[str, Any],
    outputs: tuple[str, ...] = OUTPUTS,
    name: str = "attention",
) -> bytes:
    """A model of one node; `inputs` are name: (ONNX type, shape), those absent are left unconnected."""
    last = max(INPUTS.index(port) for port in inputs)
    slots = [port if port in inputs else "" for port in INPUTS[: last + 1]]
    node = helper.make_node(
        "GroupQueryAttention", slots, list(outputs), name=name, domain="com.microsoft", **attributes
    )
    kind = inputs["query"][0]
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(port, *inputs[port]) for port in slots if port],
        [helper.make_tensor_value_info(port, kind, None) for port in outputs if port],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


def open_session(model: bytes, *, library: bool = True, threads: int = 1) -> onnxruntime.InferenceSession:
    """A session on the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(str(library_path()))
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def session_for(node: GqaAttributes, call: GqaInputs, way: Way) -> onnxruntime.InferenceSession:
    """A session of one node that takes `call` in this way."""
    ports = {name: (ONNX_TYPES[array.dtype], [None] * array.ndim) for name, array in input_arrays(call, way).items()}
    if call.past_key is not None:
        shape = [None, node.kv_num_heads, None, call.query.shape[3]]
        ports |= dict.fromkeys(("past_key", "past_value"), (ONNX_TYPES[call.query.dtype], shape))
    model = node_model(ports, attributes_of(node, call, way))
    return open_session(model, library=way.library, threads=way.threads)


class Cache:
    """The bytes of both sides of one layer's cache in a layout, NaN where nothing was put."""

    def __init__(self, layout: int, node: GqaAttributes, call: GqaInputs, capacity: int) -> None:
        batch, _, _, head_dim = call.query.shape
        self.layout = layout
        self.shape = (batch, node.kv_num_heads, capacity, head_dim)
        count = 1 if layout in (2, 3) else 2
        physical = cache_shape(layout, batch, capacity, LAYERS, node.kv_num_heads, head_dim)
        self.storage = [np.full(physical, np.nan, call.query.dtype) for _ in range(count)]

    def view(self, side: int) -> Array:
        """Logical array `[batch, kv_heads, capacity, head_dim]` over the bytes."""
        return cache_view(self.storage[side % len(self.storage)], self.layout, side, LAYER)

    def address(self, side: int) -> int:
        """Where the binding begins."""
        return int(self.view(side).__array_interface__["data"][0])

    def put(self, side: int, past: Array, lengths: Array) -> None:
        """Write the live prefix of every sequence."""
        for b, length in enumerate(lengths):
            self.view(side)[b, :, :length] = past[b, :, :length]


def past_lengths(call: GqaInputs) -> NDArray[np.int64]:
    """Tokens that were in each sequence's cache before the call."""
    totals = np.asarray(call.seqlens_k, np.int64).reshape(-1) + 1
    fresh = np.minimum(call.query.shape[1], totals) if call.query_seqlens is None else call.query_seqlens
    return totals - np.asarray(fresh, np.int64).reshape(-1)


def run_gqa(
    node: GqaAttributes, call: GqaInputs, way: Way, session: onnxruntime.InferenceSession | None = None
) -> GqaOutputs:
    """Make the call and return what it wrote; `call.capacity` is the present's.

    A past is put into its buffer up to its live prefix, everything else there is NaN before the call, and so are the
    output and, where it has a buffer of its own, the present.
    """
    session = session or session_for(node, call, way)
    arrays = input_arrays(call, way)
    layout = way.layout or 0
    present = Cache(layout, node, call, call.capacity)
    binding = session.io_binding()
    kept: list[Any] = [present]

    def element(array: Array) -> Any:
        return TensorProto.BFLOAT16 if array.dtype == ml_dtypes.bfloat16 else array.dtype

    for name, array in arrays.items():
        binding.bind_input(name, "cpu", 0, element(array), array.shape, array.ctypes.data)
    if call.past_key is not None:
        assert call.past_value is not None
        past = Cache(layout, node, call, call.past_key.shape[2]) if way.two_buffers else present
        kept.append(past)
        for side, (name, content) in enumerate((("past_key", call.past_key), ("past_value", call.past_value))):
            past.put(side, content, past_lengths(call))
            binding.bind_input(name, "cpu", 0, element(call.query), past.shape, past.address(side))
    batch, q_len, heads, head_dim = call.query.shape
    output = np.full((batch, q_len, heads, head_dim), np.nan, call.query.dtype)
    flat = (batch, q_len, heads * head_dim)
    binding.bind_output("output", "cpu", 0, element(output), flat, output.ctypes.data)
    for side, name in enumerate(("present_key", "present_value")):
        binding.bind_output(name, "cpu", 0, element(output), present.shape, present.address(side))
    session.run_with_iobinding(binding)
    del kept
    return GqaOutputs(output.astype(np.float64), present.view(0), present.view(1))
