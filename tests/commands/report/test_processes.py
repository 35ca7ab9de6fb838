"""Speed-up, efficiency and loss differences of runs with different world sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.report.conftest import write_run
from toolkit.commands import main
from toolkit.commands.report.processes import process_rows, process_tables
from toolkit.commands.report.records import read_runs
from toolkit.errors import EXIT_DONE


def write(folder: Path, processes: int, rate: float, off: float = 0.0, seed: int = 0, **settings: Any) -> Path:
    """Write a finished run with `off` added to the loss of step 8."""
    results = {"world_size": processes, "samples_per_second": rate, "test_loss": 0.5 + seed + off}
    run = write_run(folder, seed=seed, settings={"ep_size": None} | settings, results=results)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["train/loss"] += off * (line["step"] == 8)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def scaled(tmp_path: Path) -> list[Path]:
    """Two seeds on one and on four processes, one run with ep_size=2, and one with another learning rate."""
    return [
        write(tmp_path / "four", 4, 320.0, off=1e-6),
        write(tmp_path / "one", 1, 90.0),
        write(tmp_path / "one-b", 1, 110.0, seed=1),
        write(tmp_path / "four-b", 4, 280.0, off=-3e-6, seed=1),
        write(tmp_path / "pairs", 4, 200.0, ep_size=2, num_processes=4, gradient_accumulation_steps=2),
        write(tmp_path / "other", 2, 150.0, lr=0.7),
    ]


def test_runs_are_compared_with_the_smallest_world_size(scaled: list[Path]):
    (rows,) = process_rows(read_runs(scaled))
    assert [(row.processes, list(row.runs)) for row in rows] == [
        (1, ["one", "one-b"]),
        (4, ["four", "four-b"]),
        (4, ["pairs"]),
    ]
    assert [row.samples_per_second for row in rows] == [100.0, 300.0, 200.0]
    assert [row.speed_up for row in rows] == [1.0, 3.0, 2.0]
    assert [row.efficiency for row in rows] == [1.0, 0.75, 0.5]
    losses = [row.train_loss_difference for row in rows]
    assert losses == pytest.approx([0.0, 3e-6, 0.0], rel=1e-6), "per seed"
    assert [row.test_loss_difference for row in rows] == pytest.approx([0.0, 3e-6, 0.0], rel=1e-6)
    assert [row.settings["ep_size"] for row in rows] == [None, None, 2]


def test_compare_prints_the_process_table(scaled: list[Path], capsys: pytest.CaptureFixture[str]):
    head, *rows = process_tables(read_runs(scaled))[0]
    assert head[:2] == ["processes", "runs"]
    assert [
        rows[1][head.index(name)]
        for name in ("processes", "runs", "samples/s", "speed-up over 1", "efficiency", "train/loss differs by")
    ] == ["4", "four, four-b", "300", "3.00", "75%", "3e-06"]
    assert main(["compare", *map(str, scaled)]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "The same training on several numbers of processes:" in printed
    assert all(cell in printed for cell in rows[1])
    assert main(["compare", "--json", *map(str, scaled)]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["processes"][0][1]["efficiency"] == 0.75
