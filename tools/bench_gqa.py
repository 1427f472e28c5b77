"""Times one GroupQueryAttention node on a GPU: our kernels in every layout, ONNX Runtime's node, torch's SDPA.

All providers of a row run in one process, their samples interleaved, each as one captured graph of as many calls as the
model has layers, every call on a cache of its own (so that nothing is left in L2). A call is the whole node: rotary
embedding, append, attention; `sdpa` is the attention alone. Providers that are not installed are left out and named.

    python tools/bench_gqa.py --json result.json [--rows decode-1024,…] [--shapes 28/4/128,…]
"""

from __future__ import annotations

import contextlib
import math
import statistics
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from onnx_kv import cuda
from onnx_kv.bench.result import Result, Row, command_line, environment
from onnx_kv.layout import KvLayout, LayerShape, Side, reservation_index, strides, token_offset, token_width
from onnx_kv.ops.cuda_gqa import GqaParams, KvStrides, launch

SAMPLES = 7
SAMPLE_MS = 8.0
HALF = 2


@dataclass(frozen=True)
class Shape:
    """A model's attention."""

    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @property
    def name(self) -> str:
        """Query heads, KV heads, head size."""
        return f"{self.q_heads}/{self.kv_heads}/{self.head_dim}"


SHAPES = [Shape(28, 4, 128, 28), Shape(32, 8, 128, 32), Shape(14, 2, 64, 24)]


@dataclass(frozen=True)
class Case:
    """What a call does: `totals` are the rows' tokens after it, of which `q_len` are new; `capacity` slots a row."""

    name: str
    totals: tuple[int, ...]
    q_len: int
    capacity: int


def _mixed(batch: int) -> tuple[int, ...]:
    """Lengths from 512 to 7,680 with mean 4,096, in no order."""
    lengths = np.linspace(512, 7680, batch).round().astype(int)
    return tuple(int(x) for x in np.random.default_rng(0).permutation(lengths))


CASES = [
    *(Case(f"decode-{n}", (n,), 1, n) for n in (1024, 8192, 32768, 131072)),
    *(Case(f"decode-batch-{b}", _mixed(b), 1, 8192) for b in (8, 32)),
    *(Case(f"prefill-{n}", (n,), n, n) for n in (2048, 8192)),
]


class Memory:
    """Device memory for all of a shape's rows: caches, inputs and outputs, filled with standard normal halves."""

    def __init__(self, stream: cuda.Stream, nbytes: int) -> None:
        self.stream = stream
        self.buffer = cuda.Buffer(nbytes)
        block = np.random.default_rng(1).standard_normal(1 << 24, np.float32).astype(np.float16)
        step = min(block.nbytes, nbytes)
        self.buffer.write(block[: step // HALF], stream)
        done = step
        while done < nbytes:
            step = min(done, nbytes - done)
            stream.copy(self.buffer.address + done, self.buffer.address, step, cuda.CopyKind.DEVICE_TO_DEVICE)
            done += step
        stream.synchronize()

    def put(self, array: np.ndarray[Any, Any]) -> int:
        """Device address of a copy of `array` that lives as long as this object."""
        self._kept = [*getattr(self, "_kept", []), cuda.copy_to_device(np.ascontiguousarray(array), self.stream)]
        return self._kept[-1].address


@dataclass(frozen=True)
class Inputs:
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
    def place(cls, memory: Memory, shape: Shape, case: Case) -> Inputs:
        """Lay the activations at the memory's start, the caches behind them."""
        tokens = len(case.totals) * case.q_len
        wide, narrow = (tokens * heads * shape.head_dim * HALF for heads in (shape.q_heads, shape.kv_heads))
        base = memory.buffer.address
        angles = np.arange(case.capacity)[:, None] * 1e6 ** -(np.arange(shape.head_dim // 2) / (shape.head_dim // 2))
        return cls(
            query=base,
            key=base + wide,
            value=base + wide + narrow,
            output=base + wide + 2 * narrow,
            cosine=memory.put(np.cos(angles).astype(np.float16)),
            sine=memory.put(np.sin(angles).astype(np.float16)),
            lengths=memory.put(np.array(case.totals, np.int32) - 1),
            cache=base + (2 * wide + 2 * narrow + (2 << 20) - 1 >> 21 << 21),
        )


def cache_bytes(shape: Shape, case: Case) -> int:
    """Bytes of all layers' caches: the same in every layout."""
    return 2 * shape.layers * len(case.totals) * case.capacity * shape.kv_heads * shape.head_dim * HALF


def needed_bytes(shape: Shape, case: Case) -> int:
    """Bytes of caches and activations."""
    tokens = len(case.totals) * case.q_len
    return cache_bytes(shape, case) + 2 * tokens * (shape.q_heads + shape.kv_heads) * shape.head_dim * HALF + (4 << 20)


def read_bytes(shape: Shape, case: Case) -> int:
    """K and V that one call of one layer must read."""
    return 2 * sum(case.totals) * shape.kv_heads * shape.head_dim * HALF


def flops(shape: Shape, case: Case) -> float:
    """Of one causal prefill without a past."""
    return sum(4 * shape.q_heads * shape.head_dim * total * total / 2 for total in case.totals)


def our_calls(layout: KvLayout, shape: Shape, case: Case, inputs: Inputs) -> list[GqaParams]:
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
    return calls


class OrtNode:
    """ONNX Runtime's own GroupQueryAttention node, bound to one layer's head-major cache after the other."""

    def __init__(self, stream: cuda.Stream, shape: Shape, case: Case, inputs: Inputs) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        provider = ("CUDAExecutionProvider", {"user_compute_stream": str(stream.handle)})
        self._session = onnxruntime.InferenceSession(ort_model(shape), options, providers=[provider])
        self._run_options = onnxruntime.RunOptions()
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        batch, total = len(case.totals), max(case.totals)
        cache = (batch, shape.kv_heads, case.capacity, shape.head_dim)
        side = math.prod(cache) * HALF
        wide, narrow = ((batch, case.q_len, heads * shape.head_dim) for heads in (shape.q_heads, shape.kv_heads))
        rotary = (case.capacity, shape.head_dim // 2)
        self._bindings = []
        for layer in range(shape.layers):
            key = inputs.cache + 2 * layer * side
            binding = self._session.io_binding()
            half, int32 = np.float16, np.int32
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
                binding.bind_input(name, "cuda", 0, kind, dims, address)
            binding.bind_cpu_input("total_sequence_length", np.array([total], np.int32))
            binding.bind_output("output", "cuda", 0, half, wide, inputs.output)
            binding.bind_output("present_key", "cuda", 0, half, cache, key)
            binding.bind_output("present_value", "cuda", 0, half, cache, key + side)
            self._bindings.append(binding)

    def __call__(self) -> None:
        """Queue all layers' calls."""
        for binding in self._bindings:
            self._session.run_with_iobinding(binding, self._run_options)


def ort_model(shape: Shape) -> bytes:
    """A model of one node."""
    import onnx
    from onnx import TensorProto, helper

    half, int32 = TensorProto.FLOAT16, TensorProto.INT32
    cache = ["b", shape.kv_heads, "c", shape.head_dim]
    wide, narrow = (["b", "s", heads * shape.head_dim] for heads in (shape.q_heads, shape.kv_heads))
    ports = {"query": wide, "key": narrow, "value": narrow, "past_key": cache, "past_value": cache}
    inputs = [helper.make_tensor_value_info(name, half, dims) for name, dims in ports.items()]
    inputs.append(helper.make_tensor_value_info("seqlens_k", int32, ["b"]))
    inputs.append(helper.make_tensor_value_info("total_sequence_length", int32, [1]))
    inputs.extend(helper.make_tensor_value_info(f"{x}_cache", half, ["r", shape.head_dim // 2]) for x in ("cos", "sin"))
    outputs = {"output": wide, "present_key": cache, "present_value": cache}
    node = helper.make_node(
        "GroupQueryAttention",
        [value.name for value in inputs],
        list(outputs),
        domain="com.microsoft",
        num_heads=shape.q_heads,
        kv_num_heads=shape.kv_heads,
        do_rotary=1,
    )
    out = [helper.make_tensor_value_info(name, half, dims) for name, dims in outputs.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "node", inputs, out)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


def sdpa_calls(shape: Shape, case: Case, inputs: Inputs) -> Callable[[], None]:
    """Torch's attention alone, on head-major caches; prefill is causal, decode sees the whole cache."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    count = cache_bytes(shape, case) // HALF
    interface = {"shape": (count,), "typestr": "<f2", "data": (inputs.cache, False), "version": 3}
    holder = type("Cache", (), {"__cuda_array_interface__": interface})()
    cache = torch.as_tensor(holder, device="cuda")
    cache = cache.view(shape.layers, 2, len(case.totals), shape.kv_heads, case.capacity, shape.head_dim)
    query = torch.randn(len(case.totals), shape.q_heads, case.q_len, shape.head_dim, device="cuda", dtype=torch.half)

    def call() -> None:
        for layer in range(shape.layers):
            key, value = cache[layer]
            scaled_dot_product_attention(query, key, value, is_causal=case.q_len > 1, enable_gqa=True)

    return call


@contextlib.contextmanager
def torch_stream(stream: cuda.Stream) -> Iterator[None]:
    """Make `stream` torch's current one."""
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)), torch.inference_mode():
        yield


def captured(stream: cuda.Stream, calls: Callable[[], None], warm: int = 2) -> cuda.CapturedGraph:
    """Run a few times, then record."""
    for _ in range(warm):
        calls()
    stream.synchronize()
    with stream.capture() as capture:
        calls()
    capture.graph.launch(stream)
    stream.synchronize()
    weakref.finalize(capture.graph, lambda _: None, calls)  # their scratch memory belongs to the graph as well
    return capture.graph


def sample(stream: cuda.Stream, graph: cuda.CapturedGraph, launches: int) -> float:
    """Milliseconds a launch."""
    with cuda.Event() as start, cuda.Event() as end:
        start.record(stream)
        for _ in range(launches):
            graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return end.elapsed_ms(start) / launches


def measure(stream: cuda.Stream, graphs: dict[str, cuda.CapturedGraph], layers: int) -> dict[str, list[float]]:
    """Microseconds a call, SAMPLES a provider, interleaved."""
    launches = {name: max(1, math.ceil(SAMPLE_MS / sample(stream, graph, 1))) for name, graph in graphs.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(SAMPLES):
        for name, graph in graphs.items():
            found[name].append(sample(stream, graph, launches[name]) * 1000 / layers)
    return found


def providers(
    stream: cuda.Stream, shape: Shape, case: Case, memory: Memory, missing: dict[str, str]
) -> dict[str, cuda.CapturedGraph]:
    """Every provider's captured calls; what cannot run goes to `missing` with its reason."""
    inputs = Inputs.place(memory, shape, case)
    graphs = {}
    for layout in KvLayout:
        calls = our_calls(layout, shape, case, inputs)
        graphs[layout.cli_name] = captured(stream, lambda calls=calls: [launch(p, stream) for p in calls] and None)
    try:
        graphs["ort"] = captured(stream, OrtNode(stream, shape, case, inputs))
    except Exception as error:  # whatever is wrong with somebody else's package must not end the run
        missing["ort"] = str(error).splitlines()[0]
    if len(set(case.totals)) == 1:  # a batch of mixed lengths needs a mask there, which no fast path takes
        try:
            with torch_stream(stream):
                graphs["sdpa"] = captured(stream, sdpa_calls(shape, case, inputs))
        except Exception as error:
            missing["sdpa"] = str(error).splitlines()[0]
    return graphs


def chosen(names: str, everything: list[Any]) -> list[Any]:
    """Those of `everything` whose name is in a comma-separated list; all, if it is empty."""
    wanted = names.split(",") if names else [item.name for item in everything]
    return [item for item in everything if item.name in wanted]


@click.command(help=__doc__)
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the result here.")
@click.option("--rows", default="", help="Only these rows, e.g. decode-1024,prefill-2048.")
@click.option("--shapes", default="", help="Only these shapes, e.g. 32/8/128.")
def main(target: Path | None, rows: str, shapes: str) -> None:
    """Measure, print, write."""
    console = Console(width=160)
    info = cuda.device_info(0)
    table = Table(
        "row",
        "shape",
        *(x.cli_name for x in KvLayout),
        "ort",
        "sdpa",
        "ort/ours",
        "worst layout",
        "rate",
        title=info.name,
    )
    results: list[Row] = []
    missing: dict[str, str] = {}
    for shape in chosen(shapes, SHAPES):
        for case in chosen(rows, CASES):
            stream = cuda.Stream()
            memory = Memory(stream, needed_bytes(shape, case))
            found = measure(stream, providers(stream, shape, case, memory, missing), shape.layers)
            stream.synchronize()
            memory.buffer.close()
            for name, samples in found.items():
                results.append(Row.of(f"{case.name} {shape.name} {name}", "us", samples))
            table.add_row(*summary(shape, case, {name: statistics.median(s) for name, s in found.items()}))
    console.print(table)
    for name, reason in missing.items():
        console.print(f"{name} left out: {reason}")
    if target:
        facts = {"device": info.name, "driver": str(info.driver_version)}
        target.write_text(Result(command_line(), environment(facts), tuple(results)).to_json())


def summary(shape: Shape, case: Case, medians: dict[str, float]) -> list[str]:
    """A table's row: microseconds, ORT's and the slowest layout's over head-major's, and the rate reached."""
    ours = medians["head-major"]
    cells = [
        f"{medians[name]:.1f}" if name in medians else "" for name in [*(x.cli_name for x in KvLayout), "ort", "sdpa"]
    ]
    ratio = f"{medians['ort'] / ours:.2f}" if "ort" in medians else ""
    worst = max(medians[x.cli_name] for x in KvLayout) / ours
    rate = (
        f"{flops(shape, case) / ours / 1e6:.0f} TFLOP/s"
        if case.q_len > 1
        else f"{read_bytes(shape, case) / ours / 1e6:.2f} TB/s"
    )
    return [case.name, shape.name, *cells, ratio, f"{worst:.3f}", rate]


if __name__ == "__main__":
    main()
