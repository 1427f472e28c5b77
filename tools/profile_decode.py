"""Where a decode step's time goes, kernel by kernel, with the decoder's counters beside it.

    python tools/profile_decode.py MODEL_DIR [--device cuda] [--graph off] [--prompt-tokens 512] [--json FILE]

On the CPU a kernel is a node of the graph as ONNX Runtime runs it (after its fusions), timed by ONNX Runtime's
profiler; times are medians over the steps. On CUDA it is a CUDA kernel or copy, timed by CUPTI through torch's
profiler, also inside a captured graph; times are means. This needs a torch with CUDA beside onnxruntime-gpu. ONNX
Runtime's own profiler is not used there: its times are those of launches.

What to keep in mind when reading:

- `the step` was timed without a profiler, from the caller's side. What is profiled is longer, the more so the smaller
  its kernels are: on the CPU ONNX Runtime's run of the model, on CUDA the whole step. Shares are of that.
- `outside of kernels` is what was profiled less its kernels: on the CPU ONNX Runtime and its profiler between nodes, on
  CUDA gaps between kernels. It is negative where kernels overlap.
- A CPU node's time includes waking ONNX Runtime's threads and waiting for them.
- CUDA steps are queued ahead, so one more or less than was asked for may lie in the profile: calls a step are then
  a little off a whole number.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from onnx_kv.bench.result import command_line, environment
from onnx_kv.errors import OnnxKvError, RuntimeSetupError
from onnx_kv.runtime.decoder import Decoder

WARM_UP = 8
"""Steps before the first that counts: allocation, warm-up runs of a capture, the capture."""

COUNTERS = (
    "decode_steps",
    "captures",
    "replays",
    "invalidations",
    "growth_events",
    "growth_keeps",
    "kv_bytes_moved",
    "physical_kv_bytes",
    "reserved_kv_bytes",
    "maps",
    "decline_reason",
)


@dataclass(frozen=True)
class Kernel:
    """One kind of kernel: calls and microseconds a step."""

    name: str
    calls: float
    us: float


@dataclass(frozen=True)
class Profile:
    """One model's step, in microseconds: `plain_us` without a profiler, `profiled_us` and kernels with it."""

    plain_us: float
    profiled_us: float
    kernels: tuple[Kernel, ...]
    stats: dict[str, Any]

    @property
    def outside_us(self) -> float:
        """What was profiled less its kernels."""
        return self.profiled_us - sum(kernel.us for kernel in self.kernels)


def timed_steps(decoder: Decoder, prompt: list[int], steps: int) -> Iterator[float]:
    """Generate, and yield the microseconds of each of `steps` steps after the warm-up."""
    stream = decoder.stream(prompt, max_new_tokens=1 + WARM_UP + steps, stop_tokens=[])
    for _ in range(1 + WARM_UP):
        next(stream)
    for _ in range(steps):
        started = time.perf_counter()
        next(stream)
        yield (time.perf_counter() - started) * 1e6


def node_kernels(events: Iterable[dict[str, Any]], steps: int, by_node: bool) -> tuple[float, tuple[Kernel, ...]]:
    """Median microseconds of the last `steps` runs of ONNX Runtime's trace, and of their kernels.

    Args:
        events: ONNX Runtime's profile. A run is an event `model_run`, its nodes end in `_kernel_time`; microseconds.
        steps: decode steps, one run each, at the trace's end.
        by_node: a kernel for each node instead of each operator.
    """
    events = list(events)
    runs = sorted((event["ts"], event["dur"]) for event in events if event["name"] == "model_run")[-steps:]
    starts = [start for start, _ in runs]
    times: dict[str, list[float]] = defaultdict(lambda: [0.0] * steps)
    calls: dict[str, int] = defaultdict(int)
    for event in events:
        step = bisect.bisect_right(starts, event["ts"]) - 1
        if step >= 0 and event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            node, operator = event["name"].removesuffix("_kernel_time"), event["args"]["op_name"]
            name = f"{operator} {node}" if by_node else operator
            times[name][step] += event["dur"]
            calls[name] += 1
    kernels = tuple(Kernel(name, calls[name] / steps, statistics.median(found)) for name, found in times.items())
    return statistics.median(duration for _, duration in runs), kernels


def profile_cpu(model: Path, prompt: list[int], steps: int, by_node: bool, settings: dict[str, Any]) -> Profile:
    """Profile a step on the CPU."""
    with Decoder(model, **settings) as decoder:
        plain = statistics.median(timed_steps(decoder, prompt, steps))
        stats = decoder.stats.as_dict()
    with (
        tempfile.TemporaryDirectory() as folder,
        Decoder(model, profile=Path(folder) / "profile", **settings) as decoder,
    ):
        for _ in timed_steps(decoder, prompt, steps):
            pass
        events = json.loads(decoder.end_profile().read_bytes())
    return Profile(plain, *node_kernels(events, steps, by_node), stats)


def profile_cuda(model: Path, prompt: list[int], steps: int, settings: dict[str, Any]) -> Profile:
    """Profile a step on a CUDA device."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError as error:
        raise RuntimeSetupError("on CUDA this needs torch's profiler: pip install torch") from error
    if not torch.cuda.is_available():
        raise RuntimeSetupError(f"torch {torch.__version__} has no CUDA here, and its profiler sees no kernel without")
    with Decoder(model, **settings) as decoder:
        plain = statistics.median(timed_steps(decoder, prompt, steps))
        stats = decoder.stats.as_dict()
        decoder.reset()
        stream = timed_steps(decoder, prompt, steps)
        next(stream)  # the warm-up is over
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            profiled = statistics.mean(stream)
    kernels = tuple(
        Kernel(entry.key, entry.count / (steps - 1), entry.self_device_time_total / (steps - 1))
        for entry in record.key_averages()
        if entry.self_device_time_total > 0
    )
    if not kernels:
        raise RuntimeSetupError("torch's profiler saw no kernel; it needs CUPTI and, on some systems, permission")
    return Profile(plain, profiled, kernels, stats)


def show(profile: Profile, top: int) -> None:
    """Print the kernels, dearest first, and the counters."""
    console = Console()
    table = Table("kernel", title="one decode step")
    for header in ("calls", "µs", "share"):
        table.add_column(header, justify="right")
    ordered = sorted(profile.kernels, key=lambda kernel: -kernel.us)
    for kernel in ordered[:top]:
        share = f"{kernel.us / profile.profiled_us:.1%}"
        table.add_row(kernel.name[:90], f"{kernel.calls:.4g}", f"{kernel.us:.1f}", share)
    rest = ordered[top:]
    if rest:
        calls, us = sum(kernel.calls for kernel in rest), sum(kernel.us for kernel in rest)
        table.add_row(f"{len(rest)} more", f"{calls:.4g}", f"{us:.1f}", f"{us / profile.profiled_us:.1%}")
    outside = f"{profile.outside_us / profile.profiled_us:.1%}"
    table.add_row("outside of kernels", "", f"{profile.outside_us:.1f}", outside, end_section=True)
    table.add_row("all that was profiled", "", f"{profile.profiled_us:.1f}", "100.0%")
    table.add_row("the step", "", f"{profile.plain_us:.1f}", "")
    console.print(table)
    for name in COUNTERS:
        value = profile.stats[name]
        console.print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}", highlight=False)


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--graph", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--steps", type=click.IntRange(min=2), default=32, show_default=True)
@click.option("--by", type=click.Choice(["operator", "node"]), default="operator", show_default=True, help="CPU only.")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="Kernels to print.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write all kernels and counters here.")
def main(
    model: Path, device: str, graph: str, prompt_tokens: int, steps: int, by: str, top: int, target: Path | None
) -> None:
    """Profile, print, write."""
    prompt = np.random.default_rng(0).integers(10, 256, prompt_tokens).tolist()
    settings = {"device": device, "graph": graph}
    try:
        if device == "cpu":
            profile = profile_cpu(model, prompt, steps, by == "node", settings)
        else:
            profile = profile_cuda(model, prompt, steps, settings)
    except OnnxKvError as error:
        raise click.ClickException(str(error)) from error
    show(profile, top)
    if target:
        facts = {"command": command_line(), "environment": environment({"device": device})}
        target.write_text(json.dumps(facts | dataclasses.asdict(profile), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
