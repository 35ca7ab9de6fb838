"""What the folder of a run holds, read for comparison: also of runs that go on, and where files are damaged."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.dynamic.records import LIFECYCLE_FILE, Epoch, read_lifecycle
from toolkit.run.folder import is_finished
from toolkit.run.tracking.jsonl import from_json, read_metrics, unreadable_lines


@dataclass(frozen=True)
class RunRecord:
    """One run, as far as its files can be read."""

    name: str
    """Of its folder, with as many parents as tell it from the others."""
    folder: Path
    config: Mapping[str, Any]
    """config.json; empty where it is damaged."""
    results: Mapping[str, Any]
    """results.json; empty while the run is not finished."""
    lines: Sequence[Mapping[str, Any]]
    """Of metrics.jsonl."""
    epochs: Sequence[Epoch]
    """Of lifecycle.jsonl."""
    finished: bool
    notices: Sequence[str]
    """What cannot be read, and what is not there yet; a sentence each."""

    @property
    def step(self) -> int:
        """Optimizer steps up to its last line of metrics."""
        return self.lines[-1]["step"] if self.lines else 0

    def last(self, metric: str) -> float | None:
        """The last value of `metric`; None where it has none."""
        return next((line[metric] for line in reversed(self.lines) if line.get(metric) is not None), None)


def readable_runs(folders: Sequence[Path]) -> list[RunRecord] | None:
    """Return the runs in `folders`; None if some hold none, with a line on stderr for each."""
    found = _problems(folders)
    sys.stderr.write("".join(f"error: {problem}\n" for problem in found))
    return None if found else read_runs(folders)


def _problems(folders: Sequence[Path]) -> list[str]:
    """A sentence for each of `folders` that holds no run, or stands there twice."""
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
    """The runs in `folders`, each of which holds one, in their order."""
    return [_read(name, folder) for name, folder in zip(_names(folders), folders, strict=True)]


def _read(name: str, folder: Path) -> RunRecord:
    notices: list[str] = []
    config = _read_json(folder / "config.json", notices)
    results = _read_json(folder / "results.json", notices) if (folder / "results.json").exists() else {}
    metrics = folder / "metrics.jsonl"
    lines = _read_lines(metrics, notices)
    epochs: list[Epoch] = []
    try:
        epochs = read_lifecycle(folder) if _read_lines(folder / LIFECYCLE_FILE, notices) else []
    except (LookupError, TypeError, AttributeError):
        notices.append(f"{LIFECYCLE_FILE}: cannot be read, and is taken as empty.")
    if not lines:
        notices.append("metrics.jsonl: holds no line yet.")
    finished = is_finished(folder)
    if lines and not finished:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(metrics.stat().st_mtime))
        notices.append(f"not finished: its last line of metrics, at step {lines[-1]['step']:,}, was written {written}.")
    return RunRecord(name, folder, config, results, lines, epochs, finished, notices)


def _is_link(path: Path, notices: list[str]) -> bool:
    """Whether a file of a run is a link: it may lead to any file of this machine, and runs do not write to one."""
    if path.is_symlink():
        notices.append(f"{path.name}: is a link, and is taken as empty: put the file itself there.")
    return path.is_symlink()


def _read_json(path: Path, notices: list[str]) -> dict[str, Any]:
    if _is_link(path, notices):
        return {}
    try:
        values = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if isinstance(values, dict):  # JSON has no NaN, though Python reads it
        unwritable = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
        return values | dict.fromkeys(unwritable)
    notices.append(f"{path.name}: cannot be read, and is taken as empty.")
    return {}


def _read_lines(path: Path, notices: list[str]) -> list[dict[str, Any]]:
    if _is_link(path, notices):
        return []
    try:
        lines, damaged = list(read_metrics(path)), unreadable_lines(path)
    except OSError:
        notices.append(f"{path.name}: cannot be read, and is taken as empty.")
        return []
    if damaged:
        shown = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        notices.append(f"{path.name}: line {shown} cannot be read and is left out.")
    return lines


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as make all of them different."""
    whole = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    raise ValueError("a folder is given twice")
