"""Comparison of one training at several world sizes: speed-up, efficiency and loss differences."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from typing import Any

from toolkit.commands.report.comparison import is_compared, settings
from toolkit.commands.report.records import RunRecord
from toolkit.run.config.settings import NOT_OF_THE_TRAJECTORY, differing_names
from toolkit.run.runs_table import is_number

HOW_WORK_IS_SHARED = NOT_OF_THE_TRAJECTORY | {"seed", "world_size", "gradient_accumulation_steps"}
"""Settings that can differ between runs of the same training, up to rounding."""
NOT_HOW = {"seed", "world_size"}
MOST_EFFICIENT = 1.1
"""Higher efficiency is a sign of a busy machine."""


FORMS = {
    "samples_per_second": ",.0f",
    "speed_up": ".2f",
    "efficiency": ".0%",
    "train_loss_difference": ".2g",
    "test_loss_difference": ".2g",
}
"""Formats of the numbers in a row."""
Row = dict[str, Any]
"""Runs of one training at one world size, compared with the smallest world size; means over seeds.

- `runs`, `processes`, and the recorded `hardware`;
- `settings`: performance settings that differ between the runs of this training, such as `ep_size`;
- `samples_per_second`, `speed_up` over the smallest world size, and `efficiency`, the speed-up per process;
- `train_loss_difference` and `test_loss_difference`: largest absolute difference of `train/loss` at the same step, and
  of `test_loss`, between runs with the same seed.
"""


def process_rows(runs: Sequence[RunRecord]) -> list[list[Row]]:
    """Return rows for each training that finished at several world sizes, smallest world size first."""
    return [_rows(group) for group in _same_trainings(runs) if len({_processes(run) for run in group}) > 1]


def process_tables(runs: Sequence[RunRecord]) -> list[list[list[str]]]:
    """Return `process_rows` as tables with a header."""
    tables = []
    for rows in process_rows(runs):
        axes = list(rows[0]["settings"])
        head = ["processes", "runs", *axes, "samples/s", f"speed-up over {rows[0]['processes']}", "efficiency"]
        head += ["train/loss differs by", "test_loss differs by", "hardware"]
        table = [head]
        for row in rows:
            numbers = ["" if row[name] is None else format(row[name], form) for name, form in FORMS.items()]
            named = [str(row["processes"]), ", ".join(row["runs"]), *map(str, row["settings"].values())]
            table.append([*named, *numbers, row["hardware"]])
        tables.append(table)
    return tables


def process_notices(runs: Sequence[RunRecord]) -> list[str]:
    """Return the limits of the comparison: shared cores, different hardware, busy machines and incomparable runs."""
    notices = []
    for rows in process_rows(runs):
        for row in rows:
            hardware, processes = row["hardware"], row["processes"]
            cores = re.search(r"(\d+) cores", hardware)
            name, first = (", ".join(each["runs"]) for each in (row, rows[0]))
            if cores and "GPU" not in hardware and " x " not in hardware and processes > int(cores[1]):
                notices.append(f"{name}: {processes} processes shared {cores[1]} cores, which limits the speed-up.")
            elif hardware != rows[0]["hardware"]:
                notices.append(f"{name}: ran on other hardware than {first}.")
            elif row["efficiency"] and row["efficiency"] > MOST_EFFICIENT:
                notices.append(
                    f"{name}: an efficiency above 100 %: {first} shared the machine with other jobs, "
                    "or used it badly: measure again on an idle one."
                )
    finished = [run for run in runs if run.finished]
    if not notices and not process_rows(runs) and len({_processes(run) for run in finished}) > 1:
        differ = [name for name in differing_names([settings(run) for run in finished]) if _decides(name)]
        notices.append(f"no comparison of world sizes: these runs also differ in other settings ({', '.join(differ)}).")
    return notices


def _decides(setting: str) -> bool:
    """Return whether runs that differ in `setting` are different trainings."""
    return setting.endswith("sha256") or setting.partition(".")[0] not in HOW_WORK_IS_SHARED


def _processes(run: RunRecord) -> int:
    return run.results.get("world_size", 1)


def _same_trainings(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Group the finished runs that differ only in settings of `HOW_WORK_IS_SHARED`."""
    groups: list[tuple[dict[str, Any], list[RunRecord]]] = []
    for run in runs:
        if not run.finished:
            continue
        mine = {name: value for name, value in settings(run).items() if _decides(name)}
        for theirs, group in groups:
            # Settings added by later versions are missing in earlier runs and do not count as a difference.
            if all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys()):
                group.append(run)
                break
        else:
            groups.append((mine, [run]))
    return [group for _, group in groups]


def _rows(group: Sequence[RunRecord]) -> list[Row]:
    found = {run.name: settings(run) for run in group}
    how = [
        name
        for name in differing_names(list(found.values()))
        if is_compared(name) and not _decides(name) and name not in NOT_HOW
    ]
    parts: dict[str, list[RunRecord]] = {}
    for run in sorted(group, key=_processes):
        key = json.dumps([_processes(run), [found[run.name].get(name) for name in how]])
        parts.setdefault(key, []).append(run)
    base, *_ = parts.values()
    return [_row(part, base, {name: found[part[0].name].get(name) for name in how}) for part in parts.values()]


def _row(part: Sequence[RunRecord], base: Sequence[RunRecord], how: dict[str, Any]) -> Row:
    speed, fewest = _speed(part), _speed(base)
    speed_up = speed / fewest if speed and fewest else None
    ratio = _processes(part[0]) / _processes(base[0])
    pairs = [(run, other) for run in part for other in base if run.config.get("seed") == other.config.get("seed")]
    return {
        "runs": [run.name for run in part],
        "processes": _processes(part[0]),
        "settings": how,
        "samples_per_second": speed,
        "speed_up": speed_up,
        "efficiency": speed_up / ratio if speed_up else None,
        "train_loss_difference": max((d for run, other in pairs for d in _differences(run, other)), default=None),
        "test_loss_difference": max(
            (
                abs(run.results["test_loss"] - other.results["test_loss"])
                for run, other in pairs
                if is_number(run.results.get("test_loss")) and is_number(other.results.get("test_loss"))
            ),
            default=None,
        ),
        "hardware": part[0].results.get("hardware", ""),
    }


def _speed(runs: Sequence[RunRecord]) -> float | None:
    found = [run.results["samples_per_second"] for run in runs if is_number(run.results.get("samples_per_second"))]
    return statistics.fmean(found) if found else None


def _differences(run: RunRecord, other: RunRecord) -> list[float]:
    """Return absolute differences of `train/loss` at the steps logged by both runs."""
    theirs = {line["step"]: line["train/loss"] for line in other.lines if is_number(line.get("train/loss"))}
    return [
        abs(line["train/loss"] - theirs[line["step"]])
        for line in run.lines
        if is_number(line.get("train/loss")) and line["step"] in theirs
    ]
