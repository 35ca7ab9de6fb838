"""`toolkit sweep` on the command line, and its axes, cells and digests."""

import csv
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from benchmarks.support.processes import ROOT
from tests.commands.sweep.toy import RECIPE
from toolkit.commands import main
from toolkit.commands.sweep.cells import CellRunner
from toolkit.commands.sweep.grid import config_digest, grid_cells, parse_axes
from toolkit.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER_ERROR, UserError
from toolkit.run import runs_table
from toolkit.run.recipe_script import load_recipe


def sweep(toy, *words: str, behave: str = "well") -> list[str]:
    return ["sweep", "--out", str(toy.parent / "out"), *words, str(toy), "full", "--behave", behave]


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def starts(toy) -> Counter:
    return Counter((toy.parent / "out" / "cells" / "starts.txt").read_text().splitlines())


def test_cells_run_once_and_fill_the_tables(toy, capsys):
    words = sweep(toy, "--grid", "labels=100,600", "--num-seeds", "2", "--jobs", "2")
    assert main(words) == EXIT_DONE
    out = toy.parent / "out"
    runs = rows(out / "runs.csv")
    assert [(run["labels"], run["seed"]) for run in runs] == [("100", "0"), ("100", "1"), ("600", "0"), ("600", "1")]
    # Accuracy is 0.9 + labels / 10,000 + seed / 100, so the sd over two seeds is 0.01 / sqrt(2).
    means = rows(out / "table.csv")
    assert [float(row["test_accuracy mean"]) for row in means] == pytest.approx([0.915, 0.965])
    assert [float(row["test_accuracy sd"]) for row in means] == pytest.approx([0.00707, 0.00707], abs=1e-5)
    table = (out / "table.md").read_text()
    assert "| 100 | 2 | 91.50 % (sd 0.71) | 1 (sd 0) |" in table
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert table in capsys.readouterr().out
    assert main(words) == EXIT_DONE
    assert set(starts(toy).values()) == {1}
    assert "4 of 4 runs are done already" in capsys.readouterr().err


def test_wandb_runs_share_a_group_and_are_named_after_cells(toy, monkeypatch):
    for name in ("WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_TAGS", "mine")
    assert main(sweep(toy, "--grid", "labels=100,600")) == EXIT_DONE
    named = [json.loads(path.read_text()) for path in (toy.parent / "out" / "cells").glob("*/wandb.json")]
    assert {name["WANDB_NAME"] for name in named} == {"labels=100 seed=0", "labels=600 seed=0"}
    assert {(name["WANDB_RUN_GROUP"], name["WANDB_TAGS"]) for name in named} == {("out", "mine,sweep out")}


def test_array_tasks_with_seed_offsets_share_the_tables(toy):
    for task in (0, 1):
        assert main(sweep(toy, "--grid", "labels=100", "--num-seeds", "1", "--seed-offset", str(task))) == EXIT_DONE
    assert starts(toy) == {"100 0.0 0": 1, "100 0.0 1": 1}
    assert "| 2 | 91.50 %" in (toy.parent / "out" / "table.md").read_text()


def test_failed_run_is_reported_and_the_others_continue(toy, capsys):
    assert main(sweep(toy, "--grid", "labels=100", "--num-seeds", "3", behave="badly")) == EXIT_BUG
    assert "failed: labels=100 seed=1 (out of luck; all of it is in" in capsys.readouterr().err
    assert len(rows(toy.parent / "out" / "runs.csv")) == 2


def test_interrupted_sweep_stops_its_runs_and_continues(toy, capsys):
    words = sweep(toy, "--grid", "labels=100,600", "--num-seeds", "1", "--jobs", "2", behave="slowly")
    logs = toy.parent / "out" / "cells"

    def interrupt() -> None:
        while sum("ready" in log.read_text() for log in logs.glob("*.log")) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main(words) == EXIT_PREEMPTED
    assert "stopped: run the same command again to continue" in capsys.readouterr().err
    assert main(words) == EXIT_DONE
    assert set(starts(toy).values()) == {2}


def test_cell_locked_by_another_job_is_skipped(toy, capsys):
    words = sweep(toy, "--grid", "labels=100,600")
    taken = grid_cells(load_recipe(toy, ["full"]), {"labels": ["600"]}, [0])[0]
    folder = toy.parent / "out" / "cells"
    folder.mkdir(parents=True)
    with FileLock(folder / f"{taken.digest}.lock"):
        assert main(words) == EXIT_DONE
    assert "1 cells run in other jobs" in capsys.readouterr().err
    assert starts(toy) == {"100 0.0 0": 1}


def test_changed_default_raises(toy, capsys):
    words = sweep(toy, "--grid", "labels=100")
    assert main(words) == EXIT_DONE
    toy.write_text(RECIPE.replace("rate: float = 0.0", "rate: float = 0.25"))
    assert main(words) == EXIT_USER_ERROR
    assert "labels=100 seed=0 was run with rate 0.0, now 0.25" in capsys.readouterr().err


def test_unknown_metric_skips_the_plot(toy, capsys):
    assert main(sweep(toy, "--grid", "labels=100", "--metric", "test_acc")) == EXIT_DONE
    message = "no sweep.png: no run has --metric test_acc. Take one of test_accuracy, test_loss."
    assert message in capsys.readouterr().err


def test_continued_search_runs_new_cells_in_parallel(toy, monkeypatch, capsys):
    batches = []
    run = CellRunner.run
    monkeypatch.setattr(CellRunner, "run", lambda self, cells: batches.append(len(cells)) or run(self, cells))
    words = ["--grid", "labels=100,200,300,400", "--grid", "rate=0,1", "--jobs", "2", "--search"]
    assert main(sweep(toy, *words, "3")) == EXIT_DONE
    assert "best of 3: validation_accuracy" in capsys.readouterr().err
    assert batches == [2, 1]
    assert len(starts(toy)) == 3
    assert main(sweep(toy, *words, "6")) == EXIT_DONE
    assert "best of 6" in capsys.readouterr().err
    assert main(sweep(toy, *words, "32")) == EXIT_DONE
    assert set(starts(toy).values()) == {1}
    assert len(starts(toy)) == 8
    assert "validation_accuracy mean" in rows(toy.parent / "out" / "table.csv")[0]


def test_cell_finished_by_another_sweep_is_not_repeated(toy, monkeypatch):
    recipe = load_recipe(toy, ["full"])
    cells = grid_cells(recipe, {"labels": ["100", "600"]}, [0])
    one, other = (CellRunner(recipe, toy.parent / "out" / "cells", jobs=1, log=print) for _ in range(2))
    monkeypatch.setattr(one, "_run", lambda *cell, run=one._run: other._run(cells[1], []) and run(*cell))
    assert one.run(cells).done == cells
    assert set(starts(toy).values()) == {1}


def test_sweep_over_planners_has_a_row_per_planner(toy):
    toy.write_text(RECIPE.replace("RunConfig, to_dict", "to_dict\nfrom toolkit import MoERunConfig as RunConfig"))
    assert main(sweep(toy, "--grid", "replan.planner=swap,lpt")) == EXIT_DONE
    table = rows(toy.parent / "out" / "table.csv")
    assert [row["replan.planner"] for row in table] == ["lpt", "swap"]


def test_search_by_a_test_metric_raises(toy, capsys):
    words = sweep(toy, "--search", "3", "--grid", "labels=100,600", "--metric", "best_test_loss")
    assert main(words) == EXIT_USER_ERROR
    assert "--metric best_test_loss: a search must not choose by test data. Take " in capsys.readouterr().err


def test_tables_are_written_under_a_lock(toy, monkeypatch):
    write, calls = runs_table.write_tables, []

    def locked_write(table, folder):
        with pytest.raises(Timeout):
            FileLock(folder / ".tables.lock").acquire(timeout=0)
        calls.append(folder)
        write(table, folder)

    monkeypatch.setattr(runs_table, "write_tables", locked_write)
    assert main(sweep(toy, "--grid", "labels=100")) == EXIT_DONE
    assert calls


def test_grid_is_the_product_of_axes_and_seeds(toy):
    axes = parse_axes(["labels=100,600", "rate=0,0.2"])
    cells = grid_cells(load_recipe(toy, ["full"]), axes, range(3, 5))
    assert [str(cell) for cell in cells] == [
        f"labels={labels} rate={rate} seed={seed}" for seed in (3, 4) for labels in (100, 600) for rate in ("0", "0.2")
    ]
    assert len({cell.digest for cell in cells}) == 8
    assert cells[0].flags == ["--labels", "100", "--rate", "0", "--seed", "3"]


@pytest.mark.parametrize("word", ["labels", "labels=1,,2", "seed=1,2", "run-dir=a,b"])
def test_invalid_axis_raises(word):
    with pytest.raises(UserError, match=f"--grid {word}: "):
        parse_axes([word])


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("labels=100,0", "labels=0: take one or more"),
        ("lables=100", "Did you mean --labels"),
        ("labels=8,08", "--grid: labels=8 seed=3 and labels=08 seed=3 have equal settings"),
    ],
)
def test_invalid_cell_raises(axis, message, toy):
    with pytest.raises(UserError, match=message):
        grid_cells(load_recipe(toy, []), parse_axes([axis]), [3])


def test_grid_over_a_speed_setting_has_a_cell_per_value(toy):
    cells = grid_cells(load_recipe(toy, []), parse_axes(["num-workers=0,1"]), [3])
    assert len({cell.digest for cell in cells}) == 2


def test_recipes_of_the_docs_can_be_swept(tmp_path):
    guide = (ROOT / "docs" / "train" / "recipes.md").read_text(encoding="utf-8")
    scripts = [block for block in re.findall(r"```python run\n(.*?)```", guide, re.DOTALL) if "run_recipe(" in block]
    assert len(scripts) > 1
    for number, text in enumerate([*scripts, (ROOT / "docs/examples/text_classification.py").read_text()]):
        script = tmp_path / f"guide_{number}.py"
        script.write_text(text)
        assert "full" in load_recipe(script, []).presets


def test_digest_depends_only_on_settings_that_affect_results(toy):
    recipe = load_recipe(toy, [])
    base = config_digest("toy", recipe.config([]))
    assert config_digest("toy", recipe.config(["--num-workers", "4", "--tracker", "none", "--cpu"])) == base
    assert config_digest("toy", recipe.config(["--labels", "100"])) == base, "100 is the default"
    assert config_digest("toy", recipe.config(["--labels", "600"])) != base
    assert config_digest("other", recipe.config([])) != base
