"""The window map of a cache: how much of each granule-sized window is live, by reservation, in numbers and drawn.

A window with one live byte costs a whole granule. Under a fixed stride the picture shows why head-major wastes: each
head's stripe lights a window of its own, and only a sliver of it is live.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onnx_kv.geometry import ByteRange, CacheGeometry, GrowthPolicy
from onnx_kv.layout import KvLayout
from onnx_kv.planning.plot import new_figure, save_figure
from onnx_kv.planning.source import ModelCache

_SMALLEST = 1e-12
_EMPTY_TO_FULL = ("#d7301f", "#fdae61", "#2166ac")
_WIDEST = 32
"""Most windows beside each other in the picture; a reservation with more of them goes on in the next line."""


def live_fractions(ranges: Iterable[ByteRange], nbytes: int, granule: int) -> npt.NDArray[np.float64]:
    """Live bytes over the granule, for each window of a reservation of `nbytes` (float64 `[windows]`).

    Args:
        ranges: the live bytes, ascending and disjoint.
        nbytes: size of the reservation.
        granule: bytes of a window.
    """
    live = np.zeros(-(-nbytes // granule))
    for start, end in ranges:
        for window in range(start // granule, -(-end // granule)):
            live[window] += min(end, (window + 1) * granule) - max(start, window * granule)
    return live / granule


def plot_window_map(model: ModelCache, path: Path, *, length: int, batch: int, granule: int) -> None:
    """Draw every layout's windows at a fixed stride with `length` tokens in each row.

    Raises:
        RuntimeSetupError: matplotlib is not installed.
        ConfigError: the file cannot be written, or has another suffix than pictures have.
    """
    figure = new_figure(10, 5.5)
    from matplotlib import colors, ticker  # new_figure has told that there is one

    palette = colors.LinearSegmentedColormap.from_list("live", _EMPTY_TO_FULL).with_extremes(under="0.9", bad="white")
    panels = figure.subplots(1, len(KvLayout))
    for axes, layout in zip(panels, KvLayout, strict=True):
        geometry = CacheGeometry(layout, model.layers, model.element_size, batch)
        live = geometry.token_bytes * batch * length
        grid = _folded(_windows(geometry, model.max_length, length, granule))
        committed = geometry.physical_bytes(GrowthPolicy.FIXED_STRIDE, model.max_length, [length] * batch, granule)
        image = axes.imshow(grid, cmap=palette, vmin=_SMALLEST, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_title(
            f"{layout.cli_name}\n{committed // granule:,} granules, {committed / 2**20:,.4g} MiB\n"
            f"{live / committed:.0%} of it live",
            fontsize=10,
        )
        for edge in range(1, grid.shape[1]):
            axes.axvline(edge - 0.5, color="white", linewidth=0.6)
        axes.set_ylabel(_rows_of(layout, grid.shape[1]), fontsize=8)
        axes.set_xlabel("window", fontsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.tick_params(labelsize=7)
    figure.suptitle(
        f"{model.source}: {length:,} of {model.max_length:,} tokens, {live / 2**20:,.4g} MiB live. "
        f"One cell: a window of {granule / 2**20:.4g} MiB; grey: reserved, costs nothing",
        fontsize=10,
    )
    figure.colorbar(image, ax=panels, label="live part of a committed granule", shrink=0.8)
    save_figure(figure, path)


def _windows(geometry: CacheGeometry, capacity: int, length: int, granule: int) -> npt.NDArray[np.float64]:
    """The live fractions of all reservations, `[reservations, windows]`; NaN beyond the end of a smaller one."""
    lines = []
    for index in range(geometry.reservations):
        ranges = geometry.live_ranges(index, capacity, [length] * geometry.batch)
        lines.append(live_fractions(ranges, geometry.reservation_bytes(index, capacity), granule))
    windows = np.full((len(lines), max(map(len, lines))), np.nan)
    for index, line in enumerate(lines):
        windows[index, : len(line)] = line
    return windows


def _folded(windows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Break lines of more than `_WIDEST` windows; the end of the last part is NaN."""
    rows, columns = windows.shape
    if columns <= _WIDEST:
        return windows
    lines = -(-columns // _WIDEST)
    padded = np.full((rows, lines * _WIDEST), np.nan)
    padded[:, :columns] = windows
    return padded.reshape(rows * lines, _WIDEST)


def _rows_of(layout: KvLayout, columns: int) -> str:
    what = {KvLayout.PAIRED: "layer", KvLayout.TOKEN_MAJOR: "the whole cache"}.get(layout, "layer and side")
    return what if columns < _WIDEST else f"{what}, {_WIDEST} windows a line"
