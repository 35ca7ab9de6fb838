"""`toolkit sweep` from the command line: it runs, goes on, tells what failed, and adds up."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from tests.commands.sweep.toy import RECIPE
from tests.support.helpers import ROOT
from toolkit.commands import main
from toolkit.commands.sweep.cells import CellRunner
from toolkit.commands.sweep.grid import grid_cells
from toolkit.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER_ERROR
from toolkit.run.recipe_script import load_recipe


def sweep(toy, *words: str, behave: str = "well") -> list[str]:
    return ["sweep", "--out", str(toy.parent / "out"), *words, str(toy), "full", "--behave", behave]


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def starts(toy) -> Counter:
    return Counter((toy.parent / "out" / "cells" / "starts.txt").read_text().splitlines())


def test_cells_run_once_and_add_up(toy, capsys):
    words = sweep(toy, "--grid", "labels=100,600", "--num-seeds", "2", "--jobs", "2")
    assert main(words) == EXIT_DONE
    out = toy.parent / "out"
    runs = rows(out / "runs.csv")
    assert [(run["labels"], run["seed"]) for run in runs] == [("100", "0"), ("100", "1"), ("600", "0"), ("600", "1")]
    # 0.9 + labels / 10,000 + seed / 100: of seeds 0 and 1 the mean is half a point up, the sd 0.01 / sqrt(2).
    means = rows(out / "table.csv")
    assert [float(row["test_accuracy mean"]) for row in means] == pytest.approx([0.915, 0.965])
    assert [float(row["test_accuracy sd"]) for row in means] == pytest.approx([0.00707, 0.00707], abs=1e-5)
    table = (out / "table.md").read_text()
    assert "| 100 | 2 | 91.50 % (sd 0.71) | 1 (sd 0) |" in table
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert table in capsys.readouterr().out
    assert main(words) == EXIT_DONE
    assert set(starts(toy).values()) == {1}, "nothing is run twice"
    assert "4 of 4 runs are done already" in capsys.readouterr().err


def test_runs_are_one_group_of_wandb_and_are_called_after_their_cells(toy, monkeypatch):
    for name in ("WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_TAGS", "mine")
    assert main(sweep(toy, "--grid", "labels=100,600")) == EXIT_DONE
    named = [json.loads(path.read_text()) for path in (toy.parent / "out" / "cells").glob("*/wandb.json")]
    assert {name["WANDB_NAME"] for name in named} == {"labels=100 seed=0", "labels=600 seed=0"}
    assert {(name["WANDB_RUN_GROUP"], name["WANDB_TAGS"]) for name in named} == {("out", "mine,sweep out")}


def test_array_tasks_take_a_seed_each_and_share_the_tables(toy):
    for task in (0, 1):
        assert main(sweep(toy, "--grid", "labels=100", "--num-seeds", "1", "--seed-offset", str(task))) == EXIT_DONE
    assert starts(toy) == {"100 0.0 0": 1, "100 0.0 1": 1}
    assert "| 2 | 91.50 %" in (toy.parent / "out" / "table.md").read_text()


def test_a_run_that_fails_is_named_and_the_others_go_on(toy, capsys):
    assert main(sweep(toy, "--grid", "labels=100", "--num-seeds", "3", behave="badly")) == EXIT_BUG
    assert "failed: labels=100 seed=1 (out of luck; all of it is in" in capsys.readouterr().err
    assert len(rows(toy.parent / "out" / "runs.csv")) == 2


def test_a_sweep_that_is_stopped_stops_its_runs_and_continues(toy):
    words = sweep(toy, "--grid", "labels=100,600", "--num-seeds", "1", "--jobs", "2", behave="slowly")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    logs = toy.parent / "out" / "cells"
    deadline = time.monotonic() + 60
    while sum("ready" in log.read_text() for log in logs.glob("*.log")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == EXIT_PREEMPTED, told
    assert "stopped: run the same command again to continue" in told
    assert main(words) == EXIT_DONE
    assert set(starts(toy).values()) == {2}


def test_a_cell_that_another_job_works_at_is_left_to_it(toy, capsys):
    words = sweep(toy, "--grid", "labels=100,600")
    taken = grid_cells(load_recipe(toy, ["full"]), {"labels": ["600"]}, [0])[0]
    folder = toy.parent / "out" / "cells"
    folder.mkdir(parents=True)
    with FileLock(folder / f"{taken.digest}.lock"):
        assert main(words) == EXIT_DONE
    assert "1 cells run in other jobs" in capsys.readouterr().err
    assert starts(toy) == {"100 0.0 0": 1}


def test_a_default_that_changed_is_not_mistaken_for_the_old_one(toy, capsys):
    words = sweep(toy, "--grid", "labels=100")
    assert main(words) == EXIT_DONE
    toy.write_text(RECIPE.replace("rate: float = 0.0", "rate: float = 0.25"))
    assert main(words) == EXIT_USER_ERROR
    assert "labels=100 seed=0 was run with rate 0.0, now 0.25" in capsys.readouterr().err


def test_sweep_with_an_unknown_metric_draws_nothing_and_says_so(toy, capsys):
    assert main(sweep(toy, "--grid", "labels=100,600", "--metric", "test_acc")) == EXIT_DONE
    said = capsys.readouterr().err
    assert "no sweep.png: no run has --metric test_acc. Take one of test_accuracy, test_loss." in said


def test_search_continued_tries_other_cells_in_parallel_and_its_metric_is_in_the_table(toy, capsys):
    words = ["--grid", "labels=100,200,300,400", "--grid", "rate=0,1", "--jobs", "2", "--search"]
    assert main(sweep(toy, *words, "3")) == EXIT_DONE
    assert "best of 3: validation_accuracy" in capsys.readouterr().err
    assert len(starts(toy)) == 3
    assert main(sweep(toy, *words, "6")) == EXIT_DONE
    assert "best of 6" in capsys.readouterr().err
    assert main(sweep(toy, *words, "32")) == EXIT_DONE
    assert set(starts(toy).values()) == {1}
    assert len(starts(toy)) == 8, "all cells of the grid, each once"
    assert "validation_accuracy mean" in rows(toy.parent / "out" / "table.csv")[0]


def test_search_with_two_jobs_runs_two_cells_at_a_time(toy, monkeypatch):
    at_once = []
    run = CellRunner.run
    monkeypatch.setattr(CellRunner, "run", lambda self, cells: at_once.append(len(cells)) or run(self, cells))
    assert main(sweep(toy, "--grid", "labels=100,200,300", "--jobs", "2", "--search", "3")) == EXIT_DONE
    assert at_once == [2, 1]


def test_cell_that_another_sweep_finished_meanwhile_is_not_run_again(toy):
    recipe = load_recipe(toy, ["full"])
    cells = grid_cells(recipe, {"labels": ["100", "600"]}, [0])
    one, other = (CellRunner(recipe, toy.parent / "out" / "cells", jobs=1, log=print) for _ in range(2))
    outcome = one.run(cells, finished=lambda cell: other.run(cells) if cell == cells[0] else None)
    assert outcome.done == cells
    assert set(starts(toy).values()) == {1}


def test_sweep_over_planners_runs_a_cell_for_each(toy):
    toy.write_text(RECIPE.replace("RunConfig, to_dict", "to_dict\nfrom toolkit import MoERunConfig as RunConfig"))
    assert main(sweep(toy, "--grid", "replan.planner=swap,lpt")) == EXIT_DONE
    table = rows(toy.parent / "out" / "table.csv")
    assert [row["replan.planner"] for row in table] == ["lpt", "swap"]


@pytest.mark.parametrize("metric", ["best_test_loss"])
def test_search_by_a_metric_of_test_data_raises(toy, metric, capsys):
    assert main(sweep(toy, "--search", "3", "--grid", "labels=100,600", "--metric", metric)) == EXIT_USER_ERROR
    assert f"--metric {metric}: a search must not choose by test data. Take " in capsys.readouterr().err


def test_tasks_of_an_array_do_not_write_the_tables_at_the_same_time(toy, monkeypatch):
    from toolkit.run import runs_table as tables

    write, calls = tables.write_tables, []

    def watched(table, folder):
        with pytest.raises(Timeout):
            FileLock(folder / ".tables.lock").acquire(timeout=0)
        calls.append(folder)
        write(table, folder)

    monkeypatch.setattr(tables, "write_tables", watched)
    assert main(sweep(toy, "--grid", "labels=100")) == EXIT_DONE
    assert calls
