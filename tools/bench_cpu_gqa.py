"""Times one GroupQueryAttention node on the CPU: our kernels head-major and seq-major, and ONNX Runtime's own node.

A call is the whole node (rotary embedding, append, attention) with past and present in one buffer, float32, on ONNX
Runtime's thread pool. The providers of a row run in one process on the same numbers, their samples interleaved, with a
pause between two so that one pool's spinning threads are asleep when the next is timed. The same cache is read again
and again, so a short one stays in the processor's caches, for every provider alike.

    python tools/bench_cpu_gqa.py [--json result.json] [--rows decode-512,…] [--shapes 14/2/64,…] [--threads 2]
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

from onnx_kv.bench.result import Result, Row, command_line, environment
from onnx_kv.layout import KV_LAYOUT_ATTRIBUTE, KvLayout
from onnx_kv.ops import library_path

SAMPLES = 21
SAMPLE_SECONDS = 0.02
PAUSE_SECONDS = 0.03


@dataclass(frozen=True)
class Shape:
    """A model's attention."""

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """Query heads, KV heads, head size."""
        return f"{self.q_heads}/{self.kv_heads}/{self.head_dim}"


@dataclass(frozen=True)
class Case:
    """What a call does: `total` tokens are in the cache after it, of which `q_len` are new."""

    name: str
    total: int
    q_len: int


SHAPES = [Shape(14, 2, 64), Shape(32, 8, 128)]
CASES = [Case("decode-512", 512, 1), Case("decode-4096", 4096, 1), Case("prefill-512", 512, 512)]
PROVIDERS: dict[str, KvLayout | None] = {
    "onnxruntime": None,
    "head-major": KvLayout.HEAD_MAJOR,
    "seq-major": KvLayout.SEQ_MAJOR,
}


def node_model(shape: Shape, layout: KvLayout | None) -> bytes:
    """A model of one node, patched to `layout`, or as ONNX Runtime's own operator takes it."""
    cache = ["b", shape.kv_heads, "c", shape.head_dim]
    wide, narrow = (["b", "s", heads * shape.head_dim] for heads in (shape.q_heads, shape.kv_heads))
    floats = {"query": wide, "key": narrow, "value": narrow, "past_key": cache, "past_value": cache}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in floats.items()]
    inputs.append(helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, ["b"]))
    inputs.append(helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, [1]))
    for name in ("cos_cache", "sin_cache"):
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["r", shape.head_dim // 2]))
    outputs = {"output": wide, "present_key": cache, "present_value": cache}
    attributes: dict[str, int] = {} if layout is None else {KV_LAYOUT_ATTRIBUTE: int(layout)}
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
    out = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "node", inputs, out)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


class Call:
    """One provider's node with everything bound."""

    def __init__(self, shape: Shape, case: Case, layout: KvLayout | None, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        if layout is not None:
            options.register_custom_ops_library(str(library_path()))
        self._session = onnxruntime.InferenceSession(
            node_model(shape, layout), options, providers=["CPUExecutionProvider"]
        )
        random = np.random.default_rng(0)
        cache = (1, shape.kv_heads, case.total, shape.head_dim)
        half = shape.head_dim // 2
        angles = np.arange(case.total)[:, None] * 1e6 ** -(np.arange(half) / half)
        dims = {"query": (1, case.q_len, shape.q_heads * shape.head_dim), "past_key": cache, "past_value": cache}
        dims["key"] = dims["value"] = (1, case.q_len, shape.kv_heads * shape.head_dim)
        arrays: dict[str, np.ndarray[Any, Any]] = {
            name: random.standard_normal(size, np.float32) for name, size in dims.items()
        }
        if layout is KvLayout.SEQ_MAJOR:  # the same numbers at other addresses
            for name in ("past_key", "past_value"):
                arrays[name] = np.ascontiguousarray(arrays[name].transpose(0, 2, 1, 3)).reshape(cache)
        arrays["seqlens_k"] = np.array([case.total - 1], np.int32)
        arrays["total_sequence_length"] = np.array([case.total], np.int32)
        arrays["cos_cache"], arrays["sin_cache"] = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
        self.output = np.empty_like(arrays["query"])
        outputs = {
            "output": self.output,
            "present_key": arrays["past_key"],
            "present_value": arrays["past_value"],
        }
        self._binding = self._session.io_binding()
        for name, array in arrays.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            self._binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._kept = arrays

    def run(self, times: int) -> float:
        """Microseconds a call, over `times` calls."""
        started = time.perf_counter()
        for _ in range(times):
            self._session.run_with_iobinding(self._binding)
        return (time.perf_counter() - started) / times * 1e6


def measure(shape: Shape, case: Case, threads: int) -> dict[str, list[float]]:
    """Microseconds a call, SAMPLES a provider, interleaved."""
    calls = {name: Call(shape, case, layout, threads) for name, layout in PROVIDERS.items()}
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
        np.testing.assert_allclose(call.output, calls["onnxruntime"].output, rtol=1e-3, atol=1e-4, err_msg=name)
    return found


def chosen(names: str, everything: list[Any]) -> list[Any]:
    """Those of `everything` whose name is in a comma-separated list; all, if it is empty."""
    wanted = names.split(",") if names else [item.name for item in everything]
    return [item for item in everything if item.name in wanted]


@click.command(help=__doc__)
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the result here.")
@click.option("--rows", default="", help="Only these rows, e.g. decode-512,prefill-512.")
@click.option("--shapes", default="", help="Only these shapes, e.g. 32/8/128.")
@click.option("--threads", default=len(os.sched_getaffinity(0)), show_default=True, help="Intra-op threads.")
def main(target: Path | None, rows: str, shapes: str, threads: int) -> None:
    """Measure, print, write."""
    facts = environment()
    title = f"{facts['processor']}, {threads} threads, onnxruntime {onnxruntime.__version__}, float32"
    table = Table(
        "row", "shape", *(f"{name}, µs" for name in PROVIDERS), "ORT / head-major", "ORT / seq-major", title=title
    )
    results: list[Row] = []
    for shape in chosen(shapes, SHAPES):
        for case in chosen(rows, CASES):
            found = measure(shape, case, threads)
            row = {
                name: Row.of(f"{case.name} {shape.name} {name}", "us", samples, knobs={"threads": threads})
                for name, samples in found.items()
            }
            results.extend(row.values())
            ratios = (f"{row['onnxruntime'].median / row[name].median:.2f} ×" for name in ("head-major", "seq-major"))
            cells = (f"{x.median:.0f} ± {x.spread / 2:.0%}" for x in row.values())
            table.add_row(case.name, shape.name, *cells, *ratios)
    Console(width=140).print(table)
    if target:
        target.write_text(Result(command_line(), facts, tuple(results)).to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
