"""Metrics of several runs as curves over steps, decimated to the size of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.commands.report.records import RunRecord
from toolkit.run.pictures.plots import natural
from toolkit.run.runs_table import is_number

POINTS_OF_A_PAGE = 120_000
MOST_POINTS, FEWEST_POINTS = 1_000, 60
"""Points per curve."""
GROUPS = {
    "train": "Training",
    "eval": "Evaluation",
    "moe": "Mixture of experts",
    "lifecycle": "Dynamic experts",
    "perf": "Performance",
}
"""Metric name prefix -> heading, in page order; other headings follow."""
OPEN_AT_FIRST = ("Training", "Evaluation", GROUPS["moe"])
"""Open headings."""
FIRST = ("loss", "accuracy", "bits_per_byte")
"""Metrics that come first under their heading."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    run: int
    """Index of the run."""
    steps: np.ndarray
    """int32 (N)."""
    values: np.ndarray
    """float32 (N); NaN for values that are not finite."""


def curves_by_metric(runs: Sequence[RunRecord]) -> dict[str, list[Curve]]:
    """Return the curves of each metric with numeric values, in page order."""
    found = {
        (index, name): [(line["step"], line[name]) for line in run.lines if name in line]
        for index, run in enumerate(runs)
        for name in dict.fromkeys(name for line in run.lines for name, value in line.items() if is_number(value))
        if name not in ("step", "train/epoch")
    }
    limit = max(FEWEST_POINTS, min(MOST_POINTS, POINTS_OF_A_PAGE // max(1, len(found))))
    return {
        name: [_curve(run, found[run, name], limit) for run in range(len(runs)) if (run, name) in found]
        for name in sorted({name for _, name in found}, key=page_order)
    }


def decimate(values: np.ndarray, limit: int) -> np.ndarray:
    """Return at most `limit` indices of `values` (N): the first, the last, and the minimum and maximum of even parts.

    Spikes of one point stay visible. A part that is all NaN keeps its first point.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    kept = {0, count - 1}
    for part in np.array_split(np.arange(1, count - 1), (limit - 2) // 2):
        finite = part[np.isfinite(values[part])]
        if len(finite):
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        else:
            kept.add(int(part[0]))
    return np.array(sorted(kept))


def heading(metric: str) -> str:
    """Return the heading of `metric` on the page."""
    group = metric.partition("/")[0] if "/" in metric else "other"
    return GROUPS.get(group, group.capitalize())


def _curve(run: int, points: Sequence[tuple[int, Any]], limit: int) -> Curve:
    wide = np.array([value if is_number(value) else math.nan for _, value in points], dtype=np.float64)
    values = np.where(np.abs(wide) <= np.finfo(np.float32).max, wide, math.nan).astype(np.float32)
    kept = decimate(values, limit)
    steps = np.array([step for step, _ in points], dtype=np.int32)[kept]
    return Curve(run, steps, values[kept])


def page_order(metric: str) -> tuple[int, int, list[Any]]:
    """Sort metrics by heading, metrics in `FIRST` first."""
    group, _, name = metric.partition("/")
    groups = list(GROUPS)
    return (
        groups.index(group) if group in groups else len(groups),
        FIRST.index(name) if name in FIRST else len(FIRST),
        natural(metric),
    )
