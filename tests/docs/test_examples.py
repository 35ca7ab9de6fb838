"""Examples with an optimizer or a loop of their author's own have the same losses on one process and on two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT
from toolkit.run.tracking.jsonl import read_metrics


def lines_of(example: str, folder: Path, processes: int, *flags: str) -> list[dict[str, Any]]:
    """Returns the lines of metrics of the debug preset."""
    words = ["debug", "--cpu", "--num-processes", str(processes), "--run-dir", str(folder), "--tracker", "none"]
    words += ["--log-every", "5"]
    words += flags
    script = ROOT / "docs" / "examples" / f"{example}.py"
    done = run_forked(str(script), *words)
    assert done.returncode == 0, done.stderr
    return list(read_metrics(folder / "metrics.jsonl"))


def values(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize("example", ["sgd_plateau", "third_party_optimizer", "own_loop"])
def test_the_losses_are_those_of_one_process(example: str, tmp_path: Path):
    alone, two = (lines_of(example, tmp_path / str(processes), processes) for processes in (1, 2))
    for name in ("train/loss",) if example == "own_loop" else ("train/loss", "eval/loss"):
        assert len(values(alone, name)) > 0
        assert values(two, name) == pytest.approx(values(alone, name), rel=1e-5)
    if example == "sgd_plateau":
        rates = values(alone, "train/learning_rate")
        assert rates[-1] < rates[0], "the rate was never halved"
        assert values(two, "train/learning_rate") == rates


def test_a_run_that_is_resumed_goes_on_with_its_scheduler(tmp_path: Path):
    whole = lines_of("sgd_plateau", tmp_path / "whole", 1)
    lines_of("sgd_plateau", tmp_path / "parts", 1, "--max-steps", "46")
    parts = lines_of("sgd_plateau", tmp_path / "parts", 1, "--extend", "--max-steps", "92")
    for name in ("train/loss", "train/learning_rate"):
        assert values(parts, name)[-3:] == values(whole, name)[-3:]


def test_readme_diff_is_what_its_script_runs():
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    after = [line[1:] for line in diff.splitlines() if line[:1] in ("+", " ") and line[1:]]
    script = (ROOT / "docs" / "examples" / "two_lines.py").read_text().splitlines()
    places = [script.index(line) for line in after]
    assert places == sorted(places)
    assert diff.count("\n+") + diff.startswith("+") == 2
