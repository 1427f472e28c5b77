"""Committed bytes over context as a picture: a line for each layout and policy, and measured points on it.

Pictures are PNG, SVG or PDF, by the file's suffix, on white, so that they read on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from onnx_kv.errors import ConfigError, RuntimeSetupError
from onnx_kv.geometry import CacheGeometry, GrowthPolicy
from onnx_kv.layout import KvLayout
from onnx_kv.planning.plan import choices, committed_bytes
from onnx_kv.planning.source import ModelCache

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 160
_SUFFIXES = (".png", ".svg", ".pdf")


class Mark(NamedTuple):
    """Bytes that were measured for `length` tokens a row."""

    layout: KvLayout
    policy: GrowthPolicy
    length: int
    nbytes: int


def plot_committed(
    model: ModelCache, path: Path, *, batch: int, granule: int, min_bucket: int, measured: Iterable[Mark] = ()
) -> None:
    """Draw the planned bytes of every layout and policy into a file, and `measured` bytes as circles.

    Raises:
        RuntimeSetupError: matplotlib is not installed.
        ConfigError: the file cannot be written, or has another suffix.
    """
    lengths = sorted({round(model.max_length ** (index / _POINTS)) for index in range(_POINTS + 1)})
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    colors = {}
    for layout, policy in choices():
        geometry = CacheGeometry(layout, model.layers, model.element_size, batch)
        committed = [
            committed_bytes(geometry, policy, length, model.max_length, min_bucket, granule) / 2**20
            for length in lengths
        ]
        # Dashed and on top, since a packed bucket often commits what seq-major does.
        dashes, order = ("-", 2) if policy is GrowthPolicy.FIXED_STRIDE else ("--", 3)
        label = f"{layout.cli_name}, {policy}"
        (line,) = axes.step(lengths, committed, dashes, where="post", label=label, zorder=order)
        colors[layout, policy] = line.get_color()
    live = [geometry.token_bytes * batch * length / 2**20 for length in lengths]
    axes.plot(lengths, live, color="black", linestyle=":", label="live bytes")
    for index, (layout, policy, length, nbytes) in enumerate(measured):
        label = "_" if index else "measured"  # matplotlib leaves "_" out of the legend
        axes.plot(
            length, nbytes / 2**20, "o", color=colors[layout, policy], markeredgecolor="black", label=label, zorder=4
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens a sequence", ylabel="committed MiB")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda number, _: f"{number:,.10g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure of so many inches.

    Raises:
        RuntimeSetupError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeSetupError("plots need matplotlib; install it: pip install 'onnx-kv[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure.

    Raises:
        ConfigError: the file cannot be written, or has another suffix than pictures have.
    """
    if path.suffix.lower() not in _SUFFIXES:  # matplotlib would append one and write another file
        raise ConfigError(f"{path}: a picture's name ends in {', '.join(_SUFFIXES)}")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the plot cannot be written: {error}") from error
