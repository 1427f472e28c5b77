"""The plan as a picture: committed bytes over context, a line for each layout and policy."""

from __future__ import annotations

from pathlib import Path

from onnx_kv.errors import ConfigError, RuntimeSetupError
from onnx_kv.geometry import CacheGeometry
from onnx_kv.planning.plan import Plan, committed_bytes

_POINTS = 160


def plot_plan(plan: Plan, path: Path) -> None:
    """Draw a plan into a PNG, SVG or PDF file, by its suffix; readable on light and dark pages.

    Raises:
        RuntimeSetupError: matplotlib is not installed.
        ConfigError: the file cannot be written, or has another suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeSetupError("plots need matplotlib; install it: pip install 'onnx-kv[plot]'") from error
    model, asked = plan.model, plan.assumptions
    lengths = sorted({round(model.max_length ** (index / _POINTS)) for index in range(_POINTS + 1)})
    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for cost in plan.costs:
        geometry = CacheGeometry(cost.layout, model.layers, model.element_size, asked.batch)
        committed = [
            committed_bytes(geometry, cost.policy, length, model.max_length, asked.min_bucket, asked.granule) / 2**20
            for length in lengths
        ]
        axes.step(lengths, committed, where="post", label=f"{cost.layout.cli_name}, {cost.policy.value}")
    live = [plan.token_bytes * asked.batch * length / 2**20 for length in lengths]
    axes.plot(lengths, live, color="black", linestyle=":", label="live bytes")
    axes.set(xscale="log", yscale="log", xlabel="tokens a sequence", ylabel="committed MiB")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the plot cannot be written: {error}") from error
