"""Times one GroupQueryAttention node on the CPU: our kernels in each layout, and ONNX Runtime's own node.

A call is the whole node (rotary embedding, append, attention) with past and present in one buffer, float32, on ONNX
Runtime's thread pool. The providers run in one process on the same numbers, their samples interleaved, with a pause
between two so that one pool's spinning threads are asleep when the next is timed. The same cache is read again and
again, so a short one stays in the processor's caches, for every provider alike. Results are checked against each other.
"""

from __future__ import annotations

import os
import statistics
import time

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from onnx_kv.bench.attention import ORT, Case, Measured, Shape, node_model, rotary_tables
from onnx_kv.errors import ParityError
from onnx_kv.layout import KvLayout, LayerShape, Side, reservation_index, strides, token_offset
from onnx_kv.ops import library_path
from onnx_kv.runtime.ort import require_onnxruntime

LAYOUTS = (KvLayout.HEAD_MAJOR, KvLayout.SEQ_MAJOR, KvLayout.PAIRED)
"""Token-major is left out: with one layer it is paired."""

SAMPLES = 21
SAMPLE_SECONDS = 0.02
PAUSE_SECONDS = 0.03
_COPY_BYTES = 256 << 20

Floats = npt.NDArray[np.float32]


def measure(shape: Shape, case: Case, threads: int = 0) -> Measured:
    """Time a call of every provider; `threads` is ONNX Runtime's, 0 for all that this process may use.

    Raises:
        RuntimeSetupError: there is no ONNX Runtime or no op library.
        ParityError: two providers gave different results.
    """
    require_onnxruntime()
    threads = threads or len(os.sched_getaffinity(0))
    calls = {ORT: _Call(shape, case, None, threads)}
    calls |= {layout.cli_name: _Call(shape, case, layout, threads) for layout in LAYOUTS}
    times = {}
    for name, call in calls.items():
        call.run(3)
        times[name] = max(1, round(SAMPLE_SECONDS * 1e6 / call.run(3)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            time.sleep(PAUSE_SECONDS)
            found[name].append(call.run(times[name]))
    for name, call in calls.items():
        if not np.allclose(call.output, calls[ORT].output, rtol=1e-3, atol=1e-4):
            raise ParityError(f"{case.name} of {shape.name}: {name} and {ORT} gave different results")
    return Measured(found)


def copy_bandwidth() -> float:
    """Bytes a second, read and written together, of copying memory with one thread; the median of a few copies."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return 2 * _COPY_BYTES / statistics.median(seconds)


class _Call:
    """One provider's node with everything bound."""

    def __init__(self, shape: Shape, case: Case, layout: KvLayout | None, threads: int) -> None:
        ort = require_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        if layout is not None:
            options.register_custom_ops_library(str(library_path()))
        model = node_model(shape, np.float32, layout)
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        random = np.random.default_rng(0)
        batch = len(case.totals)
        cache = (batch, shape.kv_heads, case.capacity, shape.head_dim)
        wide, narrow = ((batch, case.q_len, heads * shape.head_dim) for heads in (shape.q_heads, shape.kv_heads))
        inputs: dict[str, npt.NDArray[np.generic]] = {
            name: random.standard_normal(dims, np.float32)
            for name, dims in (("query", wide), ("key", narrow), ("value", narrow))
        }
        inputs["seqlens_k"] = np.array(case.totals, np.int32) - 1
        inputs["total_sequence_length"] = np.array([max(case.totals)], np.int32)
        inputs |= rotary_tables(shape, case, np.float32)
        self.output = np.empty(wide, np.float32)
        values = [random.standard_normal(cache, np.float32) for _ in Side]
        buffer, starts = _cache(layout or KvLayout.HEAD_MAJOR, shape, case, values)
        self._binding = self._session.io_binding()
        for name, array in inputs.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._binding.bind_output("output", "cpu", 0, np.float32, wide, self.output.ctypes.data)
        for name, start in zip(("key", "value"), starts, strict=True):
            address = buffer.ctypes.data + start * buffer.itemsize
            self._binding.bind_input(f"past_{name}", "cpu", 0, np.float32, cache, address)
            self._binding.bind_output(f"present_{name}", "cpu", 0, np.float32, cache, address)
        self._kept = (inputs, buffer)

    def run(self, times: int) -> float:
        """Microseconds a call, over `times` calls."""
        started = time.perf_counter()
        for _ in range(times):
            self._session.run_with_iobinding(self._binding)
        return (time.perf_counter() - started) / times * 1e6


def _cache(layout: KvLayout, shape: Shape, case: Case, values: list[Floats]) -> tuple[Floats, list[int]]:
    """A buffer with keys and values (BNSH) as `layout` has them, and the element where each of the two begins."""
    layer = (LayerShape(shape.kv_heads, shape.head_dim),)
    distance = strides(layout, layer, 0, case.capacity)
    buffer = np.empty(2 * values[0].size, np.float32)
    starts = []
    for side, array in zip(Side, values, strict=True):
        start = reservation_index(layout, 0, side) * array.size + token_offset(layout, layer, 0, side)
        elements = (distance.batch, distance.head, distance.seq, 1)
        view = as_strided(buffer[start:], array.shape, [stride * buffer.itemsize for stride in elements])
        view[...] = array
        starts.append(start)
    return buffer, starts
