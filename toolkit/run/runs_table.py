"""Sweep results: a row per run, and means with spreads over seeds, as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from toolkit.run.config.settings import decides_what_is_learned, differing_names, leaves
from toolkit.run.folder import read_json, write_text
from toolkit.run.markdown import markdown_table
from toolkit.run.tracking.metric_names import is_share

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Finished runs of a folder."""

    axes: list[str]
    """Fields that differ between runs, without the seed."""
    metrics: list[str]
    runs: list[Row]
    """Axes, seed, metrics and digest of each run."""

    def means(self) -> list[Row]:
        """Return a row per combination of the axes: runs, mean, sample sd (None for one run), min and max."""
        rows = []
        for key in dict.fromkeys(_key(run, self.axes) for run in self.runs):
            group = [run for run in self.runs if _key(run, self.axes) == key]
            row: Row = {axis: group[0][axis] for axis in self.axes} | {"runs": len(group)}
            for metric in self.metrics:
                values = [run[metric] for run in group if run[metric] is not None]
                if values:
                    row[f"{metric} mean"] = statistics.fmean(values)
                    row[f"{metric} sd"] = statistics.stdev(values) if len(values) > 1 else None
                    row[f"{metric} min"] = min(values)
                    row[f"{metric} max"] = max(values)
            rows.append(row)
        return rows

    def runs_of(self, mean: Row) -> list[Row]:
        """Return the runs of a row of `means`."""
        return [run for run in self.runs if _key(run, self.axes) == _key(mean, self.axes)]

    def cells(self) -> list[list[str]]:
        """Return a header, and a row of means and spreads per combination of axes."""
        rows = [
            [*(str(row[axis]) for axis in self.axes), str(row["runs"]), *(_spread(row, name) for name in self.metrics)]
            for row in self.means()
        ]
        return [[*self.axes, "runs", *self.metrics], *rows]


def gather(
    folder: Path, axes: Iterable[str] = (), metric: str | None = None, *, metrics: Sequence[str] | None = None
) -> Table:
    """Return the finished runs below `folder`.

    Args:
        folder: The folder with the folders of runs.
        axes: Axes in addition to differing settings that affect results.
        metric: A metric in addition to `test_...`, if any run has it.
        metrics: All metrics of the table, instead.

    Raises:
        UserError: For a run whose files are damaged.
    """
    found = []
    named = [axis.replace("-", "_") for axis in axes]
    for path in sorted(folder.glob("*/results.json")):
        remedy = f"Delete {path.parent}, and run the same command again to repeat that run"
        config = read_json(path.parent / "config.json", remedy)
        settings = {name: value for name, value in leaves(config) if name in named or decides_what_is_learned(name)}
        found.append((path.parent.name, settings, read_json(path, remedy)))
    return tabulate(found, named, metric, metrics=metrics)


def tabulate(
    found: Sequence[tuple[str, Row, Row]],
    axes: Iterable[str] = (),
    metric: str | None = None,
    *,
    metrics: Sequence[str] | None = None,
) -> Table:
    """Return the table of runs given as (name, settings, results); arguments as in `gather`, axes as field names."""
    fields = dict.fromkeys(name for _, config, _ in found for name in config)
    differ = [name for name in differing_names([config for _, config, _ in found]) if name != "seed"]
    columns = list(dict.fromkeys([*(axis for axis in axes if axis in fields), *differ]))
    if metrics is None:
        numbers = {name for _, _, results in found for name, value in results.items() if is_number(value)}
        metrics = sorted(name for name in numbers if name.startswith("test_") or name == metric)
    runs: list[Row] = [
        {axis: config.get(axis) for axis in columns}
        | {"seed": config.get("seed")}
        | {metric: results.get(metric) if is_number(results.get(metric)) else None for metric in metrics}
        | {"digest": digest}
        for digest, config, results in found
    ]
    order = [*columns, "seed"]  # numbers before strings
    runs.sort(key=lambda run: [(0, run[at], "") if is_number(run[at]) else (1, 0.0, str(run[at])) for at in order])
    return Table(columns, list(metrics), runs)


def write_tables(table: Table, folder: Path) -> None:
    """Write runs.csv, table.csv and table.md to `folder`, each atomically."""
    write_text(folder / "runs.csv", _csv(table.runs))
    write_text(folder / "table.csv", _csv(table.means()))
    write_text(folder / "table.md", markdown_table(table.cells()))


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a JSON `value` is a finite float or int. Python also parses NaN, Infinity and huge integers."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and -sys.float_info.max <= value <= sys.float_info.max


def _key(row: Row, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(json.dumps(row[axis]) for axis in axes)


def _spread(row: Row, metric: str) -> str:
    """Format as `0.9412 (sd 0.0031)`; accuracies and F1 in percent."""
    mean = row.get(f"{metric} mean")
    sd = row.get(f"{metric} sd")
    if mean is None:
        return ""
    if is_share(metric):
        return f"{100 * mean:.2f} %" + (f" (sd {100 * sd:.2f})" if sd is not None else "")
    if abs(mean) >= 1000:
        return f"{mean:,.0f}" + (f" (sd {sd:,.0f})" if sd is not None else "")
    return f"{mean:.4g}" + (f" (sd {sd:.2g})" if sd is not None else "")
