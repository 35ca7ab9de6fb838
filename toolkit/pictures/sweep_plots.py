"""The picture of a sweep: a metric over the first axis of numbers, a line per combination of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.pictures.plots import GREY, INK, STYLE, palette

if TYPE_CHECKING:
    from toolkit.sweep.tables import Table

MOST_LINES = 10


def draw_sweep(table: Table, metric: str, path: Path) -> bool:
    """Means with bars of one standard deviation and a dot per run, as a PNG; False where there is nothing to draw."""
    axis = next((axis for axis in table.axes if _numbers(table, axis)), None)
    rows = [row for row in table.means() if f"{metric} mean" in row]
    if axis is None or not rows:
        return False
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    others = [other for other in table.axes if other != axis]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(", ".join(f"{other} {row[other]}" for other in others), []).append(row)
    scale = 100 if metric.endswith(("accuracy", "f1")) else 1
    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.5))
        axes = figure.subplots()
        shown = list(lines.items())[:MOST_LINES]
        for (label, points), colour in zip(shown, palette(len(shown)), strict=True):
            points.sort(key=lambda row: row[axis])
            x = [row[axis] for row in points]
            means = [scale * row[f"{metric} mean"] for row in points]
            spreads = [scale * (row[f"{metric} sd"] or 0.0) for row in points]
            axes.errorbar(x, means, spreads, color=colour, lw=1.6, marker="o", ms=4, capsize=3, label=label or None)
            keys = [{other: row[other] for other in table.axes} for row in points]
            single = [run for run in table.runs if {other: run[other] for other in table.axes} in keys]
            heights = [(run[axis], scale * run[metric]) for run in single if run[metric] is not None]
            axes.plot(*zip(*heights, strict=True), color=colour, marker=".", ls="none", alpha=0.35)
        ticks = sorted({row[axis] for row in rows})
        if ticks[0] > 0 and ticks[-1] > 20 * ticks[0]:
            axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(axis.replace("_", " "))
        axes.set_title(metric.replace("_", " ") + (", %" if scale == 100 else ""))
        axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
        if any(label for label, _ in shown):
            axes.legend(loc="best", fontsize=8, title=None if len(lines) == len(shown) else f"first {MOST_LINES} lines")
        runs = sorted({row["runs"] for row in rows})
        spread = f"mean and sd of {runs[0]}" + (f" to {runs[-1]}" if runs[-1] > runs[0] else "") + " runs"
        axes.annotate(spread, (1, 1.02), xycoords="axes fraction", ha="right", fontsize=8, color=INK)
        FigureCanvasAgg(figure).print_png(path)
    return True


def _numbers(table: Table, axis: str) -> bool:
    values = {json.dumps(run[axis]): run[axis] for run in table.runs}.values()
    return len(values) > 1 and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
