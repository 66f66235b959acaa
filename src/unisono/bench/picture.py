"""`--plot`: the run as one picture, drawn by matplotlib (`pip install 'unisono[plot]'`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .panels import Line, Panel, caption, memory_ticks, panels_of, show_time, ticks_of
from .table import show_bytes

INK, PALE = "#222222", "#dddddd"


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(document: dict[str, Any], path: str | Path) -> None:
    """Writes the picture; the file's ending says what kind."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = panels_of(document)
    if not panels:
        raise ValueError("nothing to draw: no row has a size and a result")
    style: Any = {"font.size": 9, "axes.edgecolor": INK, "text.color": INK, "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        across = min(3, len(panels))
        down = -(-len(panels) // across)
        figure = Figure(figsize=(0.6 + 3.7 * across, 1.3 + 3.1 * down), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False, sharey=not panels[0].x_is_ranks)
        axes = list(grid.flat)
        for panel, axis in zip(panels, axes, strict=False):
            _draw_panel(panel, panels, axis, first=axis in grid[:, 0])
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        seen: dict[str, Any] = {}
        for axis in axes[: len(panels)] if not panels[0].x_is_ranks else []:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                seen.setdefault(label, handle)
        if seen:
            columns = min(len(seen), 2 * across)
            figure.legend(seen.values(), seen.keys(), loc="outside upper center", ncols=columns, frameon=False)
        figure.supxlabel(caption(document), fontsize=7, color="#777777")
        figure.savefig(path, dpi=180)


def _draw_panel(panel: Panel, panels: list[Panel], axis: Any, first: bool) -> None:
    axis.set_title(panel.title, fontsize=10, fontweight="bold", loc="left")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2 if panel.y_is_bytes else 10)
    for line in panel.lines:
        _draw_line(line, axis)
    if panel.x_is_ranks:
        alone = [panel]
        axis.set_xticks(ticks_of(alone, 0, ranks=True), [f"{n:g}" for n in ticks_of(alone, 0, ranks=True)])
        axis.set_xlabel("ranks")
        axis.legend(frameon=False, fontsize=8)
        if panel.y_is_bytes:
            ticks = memory_ticks(panel)
            axis.set_yticks(ticks, [show_bytes(tick) for tick in ticks])
            axis.set_ylim(ticks[0], ticks[-1])
        else:
            _time_ticks(axis, alone)
    else:
        ticks = ticks_of(panels, 0, size=True)
        axis.set_xticks(ticks, [show_bytes(size) for size in ticks], fontsize=8)
        _time_ticks(axis, panels)
        if first:
            axis.set_ylabel("time of a call")
    axis.minorticks_off()
    axis.grid(color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _time_ticks(axis: Any, panels: list[Panel]) -> None:
    ticks = ticks_of(panels, 1)
    axis.set_yticks(ticks, [show_time(tick) for tick in ticks])
    axis.set_ylim(ticks[0] * 0.8, ticks[-1] * 1.25)


def _draw_line(line: Line, axis: Any) -> None:
    xs, ys = zip(*line.points, strict=True)
    if line.dashed:
        axis.plot(xs, ys, label=line.label, color=line.colour, linewidth=1.2, linestyle=(0, (4, 2)), zorder=2)
        return
    width = 2.4 if line.bold else 1.2
    depth = 4 if line.bold else 3
    axis.plot(
        xs, ys, label=line.label, color=line.colour, linewidth=width, marker="o", markersize=width * 1.4, zorder=depth
    )
