"""Prints the table of attention on a GPU: one node in every layout, ONNX Runtime's node and torch's SDPA.

What is timed, and how, stands in `onnx_kv/bench/attention_cuda.py`; `onnx-kv bench decode --device cuda` times shapes
of your own.

    python tools/bench_gqa.py --json result.json [--rows decode-1024,…] [--shapes 28/4/128,…]
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from onnx_kv import cuda
from onnx_kv.bench.attention import ORT, Case, Shape, flops, read_bytes
from onnx_kv.bench.attention_cuda import HALF, measure
from onnx_kv.bench.result import Result, Row, command_line, environment
from onnx_kv.layout import KvLayout

SHAPES = [Shape(28, 4, 128, 28), Shape(32, 8, 128, 32), Shape(14, 2, 64, 24)]


def _mixed(batch: int) -> tuple[int, ...]:
    """Lengths from 512 to 7,680 with mean 4,096, in no order."""
    lengths = np.linspace(512, 7680, batch).round().astype(int)
    return tuple(int(x) for x in np.random.default_rng(0).permutation(lengths))


CASES = [
    *(Case.decode(n) for n in (1024, 8192, 32768, 131072)),
    *(Case(f"decode-batch-{b}", _mixed(b), 1, 8192) for b in (8, 32)),
    *(Case.prefill(n) for n in (2048, 8192)),
]


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
            found = measure(shape, case)
            missing |= {f"{name} of {case.name}": reason for name, reason in found.missing.items()}
            for name, samples in found.samples.items():
                results.append(Row.of(f"{case.name} {shape.name} {name}", "us", samples))
            table.add_row(*summary(shape, case, {name: statistics.median(s) for name, s in found.samples.items()}))
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
        f"{medians[name]:.1f}" if name in medians else "" for name in [*(x.cli_name for x in KvLayout), ORT, "sdpa"]
    ]
    ratio = f"{medians[ORT] / ours:.2f}" if ORT in medians else ""
    worst = max(medians[x.cli_name] for x in KvLayout) / ours
    rate = (
        f"{flops(shape, case) / ours / 1e6:.0f} TFLOP/s"
        if case.q_len > 1
        else f"{read_bytes(shape, case, HALF) / ours / 1e6:.2f} TB/s"
    )
    return [case.name, shape.name, *cells, ratio, f"{worst:.3f}", rate]


if __name__ == "__main__":
    main()
