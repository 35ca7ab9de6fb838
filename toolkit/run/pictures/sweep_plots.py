"""The plot of a sweep: a metric over the first numeric field, a line per combination of the other fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.run.pictures.plots import GREY, INK, colour_of, save_figure
from toolkit.run.tracking.metric_names import is_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 10
Row = Mapping[str, Any]


def draw_sweep(path: Path, metric: str, fields: Sequence[str], runs: Sequence[Row], means: Sequence[Row]) -> None:
    """Draw means with bars of one standard deviation, and a dot per run; nothing if no field has several numbers.

    `fields` differ between `runs`; `means` has a row per combination of them with `METRIC mean` and `METRIC sd`.
    """
    axis = next((field for field in fields if _is_numeric([run[field] for run in runs])), None)
    rows = [row for row in means if f"{metric} mean" in row]
    if axis is not None and rows:
        save_figure(path, lambda figure: _draw(figure, metric, axis, fields, runs, rows))


def _draw(figure: Figure, metric: str, axis: str, fields: Sequence[str], runs: Sequence[Row], rows: list[Row]) -> None:
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(", ".join(f"{field} {row[field]}" for field in fields if field != axis), []).append(row)
    scale = 100 if is_share(metric) else 1
    figure.set_size_inches(7.5, 4.5)
    axes = figure.subplots()
    shown = list(lines.items())[:MOST_LINES]
    for number, (label, points) in enumerate(shown):
        colour = colour_of(number)
        points.sort(key=lambda row: row[axis])
        x = [row[axis] for row in points]
        means = [scale * row[f"{metric} mean"] for row in points]
        spreads = [scale * (row[f"{metric} sd"] or 0.0) for row in points]
        axes.errorbar(x, means, spreads, color=colour, lw=1.6, marker="o", ms=4, capsize=3, label=label or None)
        keys = [{other: row[other] for other in fields} for row in points]
        single = [run for run in runs if {other: run[other] for other in fields} in keys]
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
    seeds = sorted({row["runs"] for row in rows})
    spread = f"mean and sd of {seeds[0]}" + (f" to {seeds[-1]}" if seeds[-1] > seeds[0] else "") + " runs"
    axes.annotate(
        spread if seeds[-1] > 1 else "", (1, 1.02), xycoords="axes fraction", ha="right", fontsize=8, color=INK
    )


def _is_numeric(values: Sequence[Any]) -> bool:
    """Return whether `values` are numbers and not all equal."""
    distinct = {json.dumps(value): value for value in values}.values()
    return len(distinct) > 1 and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in distinct)
