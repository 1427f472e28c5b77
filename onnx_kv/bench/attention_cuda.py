"""Times one GroupQueryAttention node on a GPU: our kernels in every layout, ONNX Runtime's node, torch's SDPA; fp16.

The providers run in one process, their samples interleaved, each as one captured graph of as many calls as the shape
has layers, every call on a cache of its own (so that nothing is left in L2). A call is the whole node: rotary
embedding, append, attention; `sdpa` is the attention alone. Providers that are not installed are left out and named.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnx_kv import cuda
from onnx_kv.bench.attention import ORT, Case, Measured, Shape, cache_bytes, node_model, rotary_tables
from onnx_kv.errors import RuntimeSetupError
from onnx_kv.layout import KvLayout, LayerShape, Side, reservation_index, strides, token_offset, token_width
from onnx_kv.ops.cuda_gqa import GqaParams, KvStrides, launch

HALF = 2
"""Bytes an element."""

SAMPLES = 7
SAMPLE_MS = 8.0
_COPY_BYTES = 1 << 30

Calls = Callable[[], None]


class _Replay(NamedTuple):
    """A captured graph, and what it captured: their scratch memory belongs to the graph as well."""

    graph: cuda.CapturedGraph
    calls: Calls


def measure(shape: Shape, case: Case, device: int = 0) -> Measured:
    """Time a call of every provider on a CUDA device."""
    found = Measured()
    stream = cuda.Stream(device)
    memory = _Memory(stream, _needed_bytes(shape, case))
    replays = _providers(stream, shape, case, memory, found.missing)
    launches = {name: max(1, math.ceil(SAMPLE_MS / _sample(stream, replay, 1))) for name, replay in replays.items()}
    found.samples = {name: [] for name in replays}
    for _ in range(SAMPLES):
        for name, replay in replays.items():
            found.samples[name].append(_sample(stream, replay, launches[name]) * 1000 / shape.layers)
    stream.synchronize()
    memory.buffer.close()
    return found


def copy_bandwidth(device: int = 0) -> float:
    """Bytes a second, read and written together, of copying device memory; the median of a few copies."""
    with cuda.Stream(device) as stream, cuda.Buffer(2 * _COPY_BYTES, device) as buffer:
        seconds = []
        for _ in range(12):
            with cuda.Event(device) as start, cuda.Event(device) as end:
                start.record(stream)
                stream.copy(buffer.address + _COPY_BYTES, buffer.address, _COPY_BYTES, cuda.CopyKind.DEVICE_TO_DEVICE)
                end.record(stream)
                end.synchronize()
                seconds.append(end.elapsed_ms(start) / 1000)
    return 2 * _COPY_BYTES / statistics.median(seconds[2:])


class _Memory:
    """Device memory for all of a shape's rows: caches, inputs and outputs, filled with standard normal halves."""

    def __init__(self, stream: cuda.Stream, nbytes: int) -> None:
        self._stream = stream
        self._kept: list[cuda.Buffer] = []
        self.buffer = cuda.Buffer(nbytes, stream.device)
        block = np.random.default_rng(1).standard_normal(1 << 24, np.float32).astype(np.float16)
        step = min(block.nbytes, nbytes)
        self.buffer.write(block[: step // HALF], stream)
        done = step
        while done < nbytes:
            step = min(done, nbytes - done)
            stream.copy(self.buffer.address + done, self.buffer.address, step, cuda.CopyKind.DEVICE_TO_DEVICE)
            done += step
        stream.synchronize()

    def put(self, array: npt.NDArray[Any]) -> int:
        """Device address of a copy of `array` that lives as long as this object."""
        self._kept.append(cuda.copy_to_device(np.ascontiguousarray(array), self._stream))
        return self._kept[-1].address


@dataclass(frozen=True)
class _Inputs:
    """Addresses that every provider reads: activations, tables, lengths; `cache` is where caches begin."""

    query: int
    key: int
    value: int
    output: int
    cosine: int
    sine: int
    lengths: int
    cache: int

    @classmethod
    def place(cls, memory: _Memory, shape: Shape, case: Case) -> _Inputs:
        """Lay the activations at the memory's start, the caches behind them."""
        tokens = len(case.totals) * case.q_len
        wide, narrow = (tokens * heads * shape.head_dim * HALF for heads in (shape.q_heads, shape.kv_heads))
        base = memory.buffer.address
        tables = rotary_tables(shape, case, np.float16)
        return cls(
            query=base,
            key=base + wide,
            value=base + wide + narrow,
            output=base + wide + 2 * narrow,
            cosine=memory.put(tables["cos_cache"]),
            sine=memory.put(tables["sin_cache"]),
            lengths=memory.put(np.array(case.totals, np.int32) - 1),
            cache=base + (2 * wide + 2 * narrow + (2 << 20) - 1 >> 21 << 21),
        )


def _needed_bytes(shape: Shape, case: Case) -> int:
    """Bytes of caches and activations."""
    tokens = len(case.totals) * case.q_len
    activations = 2 * tokens * (shape.q_heads + shape.kv_heads) * shape.head_dim * HALF
    return cache_bytes(shape, case, HALF) + activations + (4 << 20)


def _providers(
    stream: cuda.Stream, shape: Shape, case: Case, memory: _Memory, missing: dict[str, str]
) -> dict[str, _Replay]:
    """Every provider's captured calls; what cannot run goes to `missing` with its reason."""
    inputs = _Inputs.place(memory, shape, case)
    replays = {
        layout.cli_name: _captured(stream, _our_calls(layout, shape, case, inputs, stream)) for layout in KvLayout
    }
    try:
        replays[ORT] = _captured(stream, _OrtNode(stream, shape, case, inputs))
    except Exception as error:  # whatever is wrong with somebody else's package must not end the run
        missing[ORT] = str(error).splitlines()[0]
    if len(set(case.totals)) > 1:
        missing["sdpa"] = "a batch of mixed lengths needs a mask there, which no fast path takes"
        return replays
    try:
        with _torch_stream(stream):
            replays["sdpa"] = _captured(stream, _sdpa_calls(stream.device, shape, case, inputs))
    except Exception as error:
        missing["sdpa"] = str(error).splitlines()[0]
    return replays


def _our_calls(layout: KvLayout, shape: Shape, case: Case, inputs: _Inputs, stream: cuda.Stream) -> Calls:
    """One call a layer, on that layer's bindings."""
    layers = [LayerShape(shape.kv_heads, shape.head_dim)] * shape.layers
    calls = []
    for layer in range(shape.layers):
        s = strides(layout, layers, layer, case.capacity)
        reserved = len(case.totals) * case.capacity * token_width(layout, layers, layer) * HALF
        key, value = (
            inputs.cache
            + reservation_index(layout, layer, side) * reserved
            + token_offset(layout, layers, layer, side) * HALF
            for side in Side
        )
        p = GqaParams(1, len(case.totals), case.q_len, shape.q_heads, shape.kv_heads, shape.head_dim)
        p.past_capacity = p.present_capacity = case.capacity
        p.query, p.key, p.value, p.output = inputs.query, inputs.key, inputs.value, inputs.output
        p.query_token_stride, p.kv_token_stride = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        p.past_key = p.present_key = key
        p.past_value = p.present_value = value
        p.past = p.present = KvStrides(s.batch, s.head, s.seq)
        p.seqlens_k, p.cos_cache, p.sin_cache = inputs.lengths, inputs.cosine, inputs.sine
        p.rotary_rows, p.rotary_dim = case.capacity, shape.head_dim
        p.scale, p.window = 1 / math.sqrt(shape.head_dim), -1
        calls.append(p)

    def call() -> None:
        for params in calls:
            launch(params, stream)

    return call


class _OrtNode:
    """ONNX Runtime's own GroupQueryAttention node, bound to one layer's head-major cache after the other."""

    def __init__(self, stream: cuda.Stream, shape: Shape, case: Case, inputs: _Inputs) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        provider = (
            "CUDAExecutionProvider",
            {"device_id": str(stream.device), "user_compute_stream": str(stream.handle)},
        )
        model = node_model(shape, np.float16, None)
        if provider[0] not in onnxruntime.get_available_providers():
            raise RuntimeSetupError("ONNX Runtime is installed without CUDA")
        self._session = onnxruntime.InferenceSession(model, options, providers=[provider])
        if provider[0] not in self._session.get_providers():
            raise RuntimeSetupError("ONNX Runtime cannot use CUDA here, and says why in its log")
        self._run_options = onnxruntime.RunOptions()
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._bindings = [self._binding(stream.device, shape, case, inputs, layer) for layer in range(shape.layers)]

    def _binding(self, device: int, shape: Shape, case: Case, inputs: _Inputs, layer: int) -> Any:
        batch = len(case.totals)
        cache = (batch, shape.kv_heads, case.capacity, shape.head_dim)
        side = math.prod(cache) * HALF
        wide, narrow = ((batch, case.q_len, heads * shape.head_dim) for heads in (shape.q_heads, shape.kv_heads))
        rotary = (case.capacity, shape.head_dim // 2)
        key = inputs.cache + 2 * layer * side
        half, int32 = np.float16, np.int32
        binding = self._session.io_binding()
        for name, kind, dims, address in (
            ("query", half, wide, inputs.query),
            ("key", half, narrow, inputs.key),
            ("value", half, narrow, inputs.value),
            ("past_key", half, cache, key),
            ("past_value", half, cache, key + side),
            ("seqlens_k", int32, (batch,), inputs.lengths),
            ("cos_cache", half, rotary, inputs.cosine),
            ("sin_cache", half, rotary, inputs.sine),
        ):
            binding.bind_input(name, "cuda", device, kind, dims, address)
        binding.bind_cpu_input("total_sequence_length", np.array([max(case.totals)], np.int32))
        binding.bind_output("output", "cuda", device, half, wide, inputs.output)
        binding.bind_output("present_key", "cuda", device, half, cache, key)
        binding.bind_output("present_value", "cuda", device, half, cache, key + side)
        return binding

    def __call__(self) -> None:
        """Queue all layers' calls."""
        for binding in self._bindings:
            self._session.run_with_iobinding(binding, self._run_options)


def _sdpa_calls(device: int, shape: Shape, case: Case, inputs: _Inputs) -> Calls:
    """Torch's attention alone, on head-major caches; prefill is causal, decode sees the whole cache."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    count = cache_bytes(shape, case, HALF) // HALF
    interface = {"shape": (count,), "typestr": "<f2", "data": (inputs.cache, False), "version": 3}
    holder = type("Cache", (), {"__cuda_array_interface__": interface})()
    place = f"cuda:{device}"
    cache = torch.as_tensor(holder, device=place)
    cache = cache.view(shape.layers, 2, len(case.totals), shape.kv_heads, case.capacity, shape.head_dim)
    query = torch.randn(len(case.totals), shape.q_heads, case.q_len, shape.head_dim, device=place, dtype=torch.half)

    def call() -> None:
        for layer in range(shape.layers):
            key, value = cache[layer]
            scaled_dot_product_attention(query, key, value, is_causal=case.q_len > 1, enable_gqa=True)

    return call


@contextlib.contextmanager
def _torch_stream(stream: cuda.Stream) -> Iterator[None]:
    """Make `stream` torch's current one."""
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, stream.device)), torch.inference_mode():
        yield


def _captured(stream: cuda.Stream, calls: Calls, warm: int = 2) -> _Replay:
    """Run a few times, then record."""
    for _ in range(warm):
        calls()
    stream.synchronize()
    with stream.capture() as capture:
        calls()
    capture.graph.launch(stream)
    stream.synchronize()
    return _Replay(capture.graph, calls)


def _sample(stream: cuda.Stream, replay: _Replay, launches: int) -> float:
    """Milliseconds a launch."""
    with cuda.Event(stream.device) as start, cuda.Event(stream.device) as end:
        start.record(stream)
        for _ in range(launches):
            replay.graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return end.elapsed_ms(start) / launches
