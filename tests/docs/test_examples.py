"""Training scripts of the documentation, on one and on two processes."""

import re
from functools import partial
from pathlib import Path

import pytest

from benchmarks.support.processes import ROOT
from tests.support.forked_python import run_forked
from toolkit.run.tracking.jsonl import read_metrics


def train(example: str, folder: Path, processes: int, *flags: str) -> partial[list[float]]:
    """Run the debug preset; returns a function from metric name to values."""
    words = ["debug", "--cpu", "--num-processes", str(processes), "--run-dir", str(folder), "--tracker", "none"]
    done = run_forked(str(ROOT / "docs" / "examples" / f"{example}.py"), *words, "--log-every", "5", *flags)
    assert done.returncode == 0, done.stderr
    return partial(values, list(read_metrics(folder / "metrics.jsonl")))


def values(lines: list[dict[str, float]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize("example", ["sgd_plateau", "third_party_optimizer", "own_loop"])
def test_losses_on_two_processes_equal_one_process(example: str, tmp_path: Path):
    single, sharded = (train(example, tmp_path / str(processes), processes) for processes in (1, 2))
    for name in ("train/loss",) if example == "own_loop" else ("train/loss", "eval/loss"):
        assert len(single(name)) > 0
        assert sharded(name) == pytest.approx(single(name), rel=1e-5)
    if example == "sgd_plateau":
        rates = single("train/learning_rate")
        assert rates[-1] < rates[0]
        assert sharded("train/learning_rate") == rates
        train(example, tmp_path / "resumed", 1, "--max-steps", "46")
        resumed = train(example, tmp_path / "resumed", 1, "--extend", "--max-steps", "92")
        for name in ("train/loss", "train/learning_rate"):
            assert resumed(name)[-3:] == single(name)[-3:]


def test_readme_diff_equals_its_script():
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    after = [line[1:] for line in diff.splitlines() if line[:1] in ("+", " ") and line[1:]]
    script = (ROOT / "docs" / "examples" / "two_lines.py").read_text().splitlines()
    places = [script.index(line) for line in after]
    assert places == sorted(places)
    assert diff.count("\n+") + diff.startswith("+") == 2
