"""Run folders read for comparison, including unfinished runs and damaged files."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from toolkit.dynamic.records import LIFECYCLE_FILE, Epoch, describe, read_lifecycle
from toolkit.errors import one_line
from toolkit.run.folder import is_finished
from toolkit.run.tracking.jsonl import from_json, read_metrics, unreadable_lines


@dataclass(frozen=True)
class RunRecord:
    """Readable files of one run."""

    name: str
    """Folder, relative to the common parent of all runs."""
    folder: Path
    config: Mapping[str, Any]
    """config.json; empty if damaged."""
    results: Mapping[str, Any]
    """results.json; empty for an unfinished run."""
    lines: Sequence[Mapping[str, Any]]
    """Log steps."""
    epochs: Sequence[Epoch]
    """From lifecycle.jsonl."""
    events: Sequence[tuple[int, str, str]]
    """Step, kind and description of changes of dynamic experts."""
    finished: bool
    notices: Sequence[str]
    """One sentence for each unreadable or missing file."""

    @property
    def step(self) -> int:
        """Last log step."""
        return self.lines[-1]["step"] if self.lines else 0

    def last(self, metric: str) -> float | None:
        """Return the last value of `metric`, or None."""
        return next((line[metric] for line in reversed(self.lines) if line.get(metric) is not None), None)


def readable_runs(folders: Sequence[Path]) -> list[RunRecord] | None:
    """Return the runs in `folders`; None if a folder has no run, with an error on stderr for each."""
    found = _problems(folders)
    sys.stderr.write("".join(f"error: {problem}\n" for problem in found))
    return None if found else read_runs(folders)


def _problems(folders: Sequence[Path]) -> list[str]:
    """Return an error for each of `folders` that holds no run or is given twice."""
    found = []
    for number, folder in enumerate(folders):
        if not folder.is_dir():
            found.append(f"{folder}: no such folder: give the folder of a run, such as runs/mnist_moe/20261122-101500.")
        elif not any((folder / name).exists() for name in ("config.json", "metrics.jsonl")):
            inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
            remedy = f"it has runs inside: {folder}/*" if inside else "give the folder of a run"
            found.append(f"{folder}: holds no run, because it has no config.json: {remedy}.")
        elif folder.resolve() in [other.resolve() for other in folders[:number]]:
            found.append(f"{folder}: is given twice: give each run once.")
    return found


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read the run in each of `folders`, in order."""
    return [_read(name, folder) for name, folder in zip(_names(folders), folders, strict=True)]


def _read(name: str, folder: Path) -> RunRecord:
    notices: list[str] = []
    metrics = folder / "metrics.jsonl"
    config: dict[str, Any] = _read_file(folder / "config.json", _object, {}, notices)
    results: dict[str, Any] = {}
    if (folder / "results.json").exists():
        results = _read_file(folder / "results.json", _results, {}, notices)
    lines: list[dict[str, Any]] = _read_file(metrics, lambda path: list(read_metrics(path)), [], notices)
    epochs, events = _read_file(folder / LIFECYCLE_FILE, _lifecycle, ([], []), notices)
    if not lines:
        notices.append("metrics.jsonl: holds no line yet.")
    elif damaged := unreadable_lines(metrics):
        shown = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        notices.append(f"metrics.jsonl: line {shown} cannot be read and is left out.")
    finished = is_finished(folder)
    if lines and not finished:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(metrics.stat().st_mtime))
        notices.append(f"not finished: its last metrics, at step {lines[-1]['step']:,}, were written {written}.")
    return RunRecord(name, folder, config, results, lines, epochs, events, finished, notices)


def _read_file(path: Path, read: Callable[[Path], Any], empty: Any, notices: list[str]) -> Any:
    """Call `read(path)`; return `empty` and add a notice if the file is damaged or not a regular file.

    Links can point to any file of this machine, and reading a pipe can hang. Runs write neither.
    """
    try:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise OSError("not a regular file")
        return read(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        notices.append(f"{path.name}: cannot be read and counts as empty ({one_line(error)}).")
        return empty


def _object(path: Path) -> dict[str, Any]:
    values = from_json(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def _lifecycle(path: Path) -> tuple[list[Epoch], list[tuple[int, str, str]]]:
    epochs = read_lifecycle(path.parent)
    events = [
        (int(event["step"]), str(event["kind"]), f"{event['layer']}: " * bool(event["layer"]) + describe(event))
        for epoch in epochs
        for event in epoch.events
    ]
    return epochs, events


class _Results(BaseModel):
    """Results that tables and notices compute with."""

    model_config = ConfigDict(strict=True)

    world_size: Annotated[int, Field(gt=0, lt=2**31)] = 1
    device: str = ""
    hardware: str = ""
    restarts: list[Any] = []


def _results(path: Path) -> dict[str, Any]:
    values = _object(path)
    _Results(**values)
    return values


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the path of each folder below their common parent."""
    whole = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in whole])
    return [path.relative_to(common).as_posix() for path in whole]
