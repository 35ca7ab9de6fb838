"""Tables of several runs: settings that differ, and final numbers with the spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.commands.report.records import RunRecord
from toolkit.run.config.settings import NOT_OF_THE_TRAJECTORY, ONLY_OF_THE_SPEED, differing_names, leaves
from toolkit.run.runs_table import Table, is_number, tabulate
from toolkit.run.summary import duration
from toolkit.run.tracking.metric_names import is_share

NOT_COMPARED = NOT_OF_THE_TRAJECTORY - ONLY_OF_THE_SPEED
"""Settings without effect on results and speed, or covered by `world_size`, `device` and the data digests."""
NUMBERS = ("samples_per_second", "train_seconds")
"""Final numbers in addition to `test_...`."""


def settings(run: RunRecord) -> dict[str, Any]:
    """Return all settings by dotted name, digests cut to 12 digits, and `world_size` and `device` if finished."""
    named = {name: str(value)[:12] if name.endswith("sha256") else value for name, value in leaves(run.config)}
    return named | {name: run.results[name] for name in ("world_size", "device") if name in run.results}


def is_compared(setting: str) -> bool:
    """Return whether runs that differ in `setting` are different experiments."""
    return setting.endswith("sha256") or setting.partition(".")[0] not in NOT_COMPARED


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """Return the settings that differ between runs, without folders. Missing settings do not differ."""
    return [name for name in differing_names([settings(run) for run in runs]) if name != "run_dir"]


def final_numbers(runs: Sequence[RunRecord]) -> Table:
    """Return the final numbers of the finished runs; runs that differ only in the seed share one row."""
    found = [
        (run.name, {name: value for name, value in settings(run).items() if is_compared(name)}, dict(run.results))
        for run in runs
        if run.finished
    ]
    tests = {name for _, _, results in found for name in results if name.startswith("test_")}
    metrics = [name for name in (*sorted(tests), *NUMBERS) if any(is_number(r.get(name)) for _, _, r in found)]
    return tabulate(found, metrics=metrics)


def final_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return `final_numbers` with a header: run names, number of runs, final numbers, then settings that differ."""
    table = final_numbers(runs)
    axes = len(table.axes)
    head, *rows = table.cells()
    names = [", ".join(run["digest"] for run in table.runs_of(mean)) for mean in table.means()]
    ordered = [[name, *row[axes:], *row[:axes]] for name, row in zip(names, rows, strict=True)]
    return [["runs", "number", *head[axes + 1 :], *head[:axes]], *ordered]


def summary_rows(runs: Sequence[RunRecord], axes: Sequence[str] = ()) -> list[list[str]]:
    """Return a header and a row for each run: name, the settings `axes`, state, last numbers, time and hardware."""
    metrics = [
        name
        for name in ("train/loss", "eval/loss", "eval/accuracy", "eval/bits_per_byte")
        if any(run.last(name) is not None for run in runs)
    ]
    head = ["run", *axes, "state", "steps", *metrics, "samples/s", "time", "restarts", "hardware"]
    rows = []
    for run in runs:
        values = settings(run)
        speeds = (run.results.get("samples_per_second"), run.last("perf/samples_per_second"))
        speed = next(filter(is_number, speeds), None)
        row = [run.name, *(str(values.get(axis, "")) for axis in axes)]
        row += ["finished" if run.finished else "not finished", f"{run.step:,}"]
        row += [metric_cell(name, run.last(name)) for name in metrics]
        seconds = run.results.get("wall_seconds")
        took = duration(seconds) if is_number(seconds) else ""
        row += [f"{speed:,.0f}" if speed else "", took, str(len(run.results.get("restarts", ()))), hardware(run)]
        rows.append(row)
    return [head, *rows]


def hardware(run: RunRecord) -> str:
    """Return world size and device, and the processor or GPU if the run recorded it."""
    results = run.results
    processes = f"{results['world_size']} x {results['device']}" if {"world_size", "device"} <= set(results) else ""
    return ", ".join(filter(None, [processes, results.get("hardware")]))


def as_json(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return everything as plain values: runs, settings that differ, and means with spreads."""
    differ = differing(runs)
    return {
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "finished": run.finished,
                "step": run.step,
                "settings": {name: value for name, value in settings(run).items() if name in differ},
                "results": dict(run.results),
                "notices": list(run.notices),
            }
            for run in runs
        ],
        "final": final_numbers(runs).means(),
    }


def metric_cell(name: str, value: float | None) -> str:
    """Format a value of the metric `name`, shares in percent; empty without a value."""
    if not is_number(value):
        return ""
    return f"{100 * value:.2f} %" if is_share(name) else f"{value:.4g}"
