"""The report of a benchmark: a table on the console, and a JSON file with the command, the code and the machine."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from toolkit.run.hardware import processor
from toolkit.run.markdown import markdown_table

ROOT = Path(__file__).resolve().parent.parent
LOAD_BEFORE = os.getloadavg()[0]
"""Load average of the minute before the benchmark started. Times are reliable if it is near 0."""
PACKAGES = ("torch", "accelerate", "transformers", "lightning", "numpy", "scikit-learn")


def _commit() -> str | None:
    """Return the measured commit, or None without git. "-dirty" marks uncommitted changes, except of results and docs,
    which benchmarks write."""
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


COMMIT = _commit()
"""Commit at the start of the benchmark."""


def machine() -> dict[str, Any]:
    """Return the environment of a benchmark result, besides the code."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load before": round(LOAD_BEFORE, 2),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
        "date": time.strftime("%Y-%m-%d"),
    }


def command() -> str:
    """Return the command line, with the script relative to the repository and only the names of absolute paths."""
    script, *words = sys.argv
    path = Path(script).resolve()
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return shlex.join(["python", shown, *(Path(word).name if Path(word).is_absolute() else word for word in words)])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `rows` as a Markdown table."""
    columns = list(rows[0])
    return markdown_table([columns, *([str(row[column]) for column in columns] for row in rows)])


def sd(values: Sequence[float], digits: int) -> float | None:
    """Return the rounded sample standard deviation, or None for one value."""
    return round(statistics.stdev(values), digits) if len(values) > 1 else None


def put_tables(page: Path, script: str, tables: str) -> None:
    """Replace the text between the marks of `script` on a page of the documentation."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- tables of benchmarks/{script} -->\n", "<!-- end of tables -->"
    before, found, rest = text.partition(begin)
    if not found:
        raise ValueError(f"{page} has no line {begin!r}")
    _, _, after = rest.partition(end)
    page.write_text(before + begin + "\n" + tables + "\n" + end + after, encoding="utf-8")


def write_report(name: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Print `rows` as a Markdown table and write them to results/<name>.json, with `facts`, command, commit and
    machine."""
    print(markdown(rows), end="")
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    record = {
        "benchmark": name,
        "command": command(),
        "commit": COMMIT,
        **facts,
        "machine": machine(),
        "rows": list(rows),
    }
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
