"""`onnx-kv bench decode` and `prefill`: one attention node in each layout, and ONNX Runtime's own in the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from onnx_kv.bench.attention import ORT, Case, Measured, Shape, flops, read_bytes
from onnx_kv.bench.result import Row
from onnx_kv.cli._console import output
from onnx_kv.cli._units import token_counts
from onnx_kv.cli.bench._report import device_facts, json_option, write_result
from onnx_kv.cuda import device_ordinal

Function = TypeVar("Function", bound=Callable[..., Any])

_SHAPES = ("14/2/64", "32/8/128")
_OPTIONS = (
    click.option("--shape", multiple=True, default=_SHAPES, show_default=True, help="Heads, KV heads, head size."),
    click.option("--device", default="cpu", show_default=True, help="cpu (float32), cuda or cuda:N (fp16)."),
    click.option(
        "--threads", type=click.IntRange(min=0), default=0, help="ONNX Runtime's, on the CPU.  [default: all]"
    ),
    click.option(
        "--layers", type=click.IntRange(min=1), default=24, show_default=True, help="Caches in turn, on CUDA."
    ),
)


def _options(function: Function) -> Function:
    for option in reversed(_OPTIONS):
        function = option(function)
    return json_option(function)


@click.command()
@_options
@click.option("--contexts", type=token_counts, default="512,4k", show_default=True, help="Tokens in the cache.")
def decode(contexts: tuple[int, ...], **options: Any) -> None:
    """Time one token through an attention node; GB/s of K and V against the device's copy bandwidth."""
    _bench("decode", [Case.decode(context) for context in contexts], **options)


@click.command()
@_options
@click.option("--lengths", type=token_counts, default="512", show_default=True, help="Tokens of the prompt.")
def prefill(lengths: tuple[int, ...], **options: Any) -> None:
    """Time a whole prompt through an attention node."""
    _bench("prefill", [Case.prefill(length) for length in lengths], **options)


def _bench(
    title: str,
    cases: Sequence[Case],
    shape: tuple[str, ...],
    device: str,
    threads: int,
    layers: int,
    json_path: Path | None,
) -> None:
    on_cuda = device_ordinal(device) is not None
    shapes = [Shape.parse(text, layers if on_cuda else 1) for text in shape]
    measure, bandwidth, element_size = _machine(device, threads)
    facts = device_facts(device) | {"copy_bandwidth_gb_s": f"{bandwidth / 1e9:.1f}"}
    table = _table(title, facts)
    rows: list[Row] = []
    missing: dict[str, str] = {}
    with Console(stderr=True).status("starting") as status:
        for one in shapes:
            for case in cases:
                status.update(f"{case.name}, {one.name}")
                found = measure(one, case)
                missing |= {f"{name} of {case.name} {one.name}": reason for name, reason in found.missing.items()}
                knobs: dict[str, str | int] = {"device": device, "threads": threads, "layers": one.layers}
                for name, samples in found.samples.items():
                    row = Row.of(f"{case.name} {one.name} {name}", "us", samples, knobs=knobs)
                    rows.append(row)
                    table.add_row(*_cells(row, name, one, case, found, bandwidth, element_size))
                table.add_section()
    console = output()
    console.print(table)
    for name, reason in missing.items():
        console.print(f"left out: {name}: {reason}", highlight=False)
    write_result(json_path, rows, facts)


def _machine(device: str, threads: int) -> tuple[Callable[[Shape, Case], Measured], float, int]:
    """How to measure on a device, its copy bandwidth, and the bytes of an element there."""
    ordinal = device_ordinal(device)
    if ordinal is None:
        from onnx_kv.bench import attention_cpu  # each is imported where its device is

        return lambda shape, case: attention_cpu.measure(shape, case, threads), attention_cpu.copy_bandwidth(), 4
    from onnx_kv.bench import attention_cuda

    return (
        lambda shape, case: attention_cuda.measure(shape, case, ordinal),
        attention_cuda.copy_bandwidth(ordinal),
        attention_cuda.HALF,
    )


def _table(title: str, facts: dict[str, str]) -> Table:
    table = Table(
        title=f"{title} on {facts['device']}; copies run at {facts['copy_bandwidth_gb_s']} GB/s, read and written"
    )
    table.add_column("row")
    for header in ("µs", "10–90 %", "rate", "of a copy", f"{ORT} / this"):
        table.add_column(header, justify="right")
    return table


def _cells(
    row: Row, provider: str, shape: Shape, case: Case, found: Measured, bandwidth: float, element_size: int
) -> list[str]:
    seconds = row.median / 1e6
    if case.q_len > 1:
        rate, share = f"{flops(shape, case) / seconds / 1e9:,.1f} GFLOP/s", ""
    else:
        read = read_bytes(shape, case, element_size) / seconds
        rate, share = f"{read / 1e9:,.1f} GB/s", f"{read / bandwidth:.0%}"
    rival = Row.of(ORT, "us", found.samples[ORT]).median if ORT in found.samples and provider != ORT else None
    ratio = f"{rival / row.median:.2f}" if rival else ""
    return [row.name, f"{row.median:.1f}", f"{row.low:.1f} – {row.high:.1f}", rate, share, ratio]
