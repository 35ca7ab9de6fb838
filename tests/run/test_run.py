"""Runs and their folders: resume, records, data, errors."""

import enum
import importlib.util
import json
import os
import random
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import error_of
from tests.support.small_run import small_config, small_trainer, train
from tests.support.special_files import symlink_to_file
from tests.support.trainers import preempted_at
from toolkit.data.identity import identity_of
from toolkit.errors import Preempted, UserError
from toolkit.run import provenance
from toolkit.run.config.experts import ExpertRunConfig
from toolkit.run.config.optimizer_options import OptimizerOptions
from toolkit.run.config.run import RunConfig
from toolkit.run.data import record_data
from toolkit.run.folder import write_json
from toolkit.run.process_settings import flushes_subnormals
from toolkit.run.run import start_run
from toolkit.run.tracking.jsonl import read_metrics


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config(**changes) -> RunConfig:
    return RunConfig(tracker="none", cpu=True).replace(**changes)


def start(recipe="toy", **changes):
    return start_run(recipe, config(**changes))


FINISHED = r"has a finished run\. Choose another"


def test_run_without_run_dir_gets_new_folder_named_by_recipe(tmp_path):
    folders = []
    for _ in range(2):
        with start() as run:
            folders.append(run.folder)
    assert {folder.parent for folder in folders} == {tmp_path / "runs" / "toy"}
    assert len(set(folders)) == 2
    assert run.checkpoints == run.folder / "checkpoints"


@pytest.mark.parametrize("name", ["chapter.txt", "metrics.jsonl", "config.json", "checkpoints/best.pt"])
def test_folder_with_other_files_raises_and_is_unchanged(name, tmp_path):
    path = tmp_path / "thesis" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"one": 1}')
    with pytest.raises(UserError, match=r"run_dir=.*thesis: it holds other files and no run"):
        start(run_dir=tmp_path / "thesis")
    assert [file for file in (tmp_path / "thesis").rglob("*") if file.is_file()] == [path]


@pytest.mark.parametrize("other", [False, True])
def test_run_that_fails_before_it_begins_leaves_no_folder(tmp_path, other):
    folder = tmp_path / "run"
    run = start(run_dir=folder)
    if other:
        (folder / "notes.txt").write_text("mine")
    run.close(failed=True)
    assert folder.exists() == other


def test_folder_removed_during_run_is_written_again(tmp_path, capsys):
    folder = tmp_path / "run"
    with start(run_dir=folder) as run:
        run.log({"train/loss": 1.0}, 10)
        shutil.rmtree(folder)
        run.log({"train/loss": 0.5}, 20)
        run.finish({"steps": 20})
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [10, 20]
    assert {"config.json", "results.json", "summary.txt"} <= {path.name for path in folder.iterdir()}
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_processes": 2}, "num_processes=2: only the command of a recipe starts processes"),
        ({"resume": "yes", "run_dir": "nothing"}, "resume='yes': no run in"),
    ],
)
def test_start_run_with_unsupported_settings_raises(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        start(**settings)
    assert not (tmp_path / "nothing").exists()


def test_finish_writes_config_results_and_summary(tmp_path, monkeypatch):
    with start(run_dir=tmp_path / "r", lr=0.5) as run:
        rank = "first"
        run.describe(dataset="rule", dataset_notice="made up", ep_size=2, callable_fact=lambda: rank)
        assert run.facts["callable_fact"] == "first"
        rank = "last"
        monkeypatch.setattr("time.time", lambda: 0.0)  # the clock is set back
        returned = run.finish({"test_accuracy": 0.5, "steps": 3, "samples": 1920})
    written = json.loads((run.folder / "config.json").read_text())
    assert (written["recipe"], written["lr"], written["optimizer"]["weight_decay"]) == ("toy", 0.5, 0.01)
    results = json.loads((run.folder / "results.json").read_text())
    assert results == returned
    expected = {"recipe": "toy", "dataset": "rule", "test_accuracy": 0.5, "seed": 0, "world_size": 1, "ep_size": 2}
    assert results | expected | {"callable_fact": "last", "torch_version": torch.__version__} == results
    assert {"git_revision", "finished_at", "device", "toolkit_version"} <= results.keys()
    assert results["wall_seconds"] >= 0
    summary = (run.folder / "summary.txt").read_text()
    facts = ("toy", "rule (made up)", "50.00%", "3 steps, 1,920 samples", "expert parallelism over 2")
    for fact in (*facts, str(run.folder)):
        assert fact in summary


def test_dataset_notice_is_printed_once(tmp_path, capsys):
    notice = "No MNIST (dataset='mnist' says why): training on digits."
    with start(run_dir=tmp_path / "r") as run:
        run.describe(dataset="digits", dataset_notice=notice)
        out = capsys.readouterr().out
        assert notice in out.splitlines()
        run.describe(dataset="digits", dataset_notice=notice)  # `fit` describes the data again
        run.finish({"steps": 3})
    assert "MNIST" not in capsys.readouterr().out
    assert f"digits ({notice})" in (tmp_path / "r" / "summary.txt").read_text()


def test_seed_determines_torch_numpy_and_python_draws():
    draws = []
    for seed in (1, 1, 2):
        with start(seed=seed):
            draws.append((torch.rand(()).item(), np.random.rand(), random.random()))
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))


def test_run_sets_precision_and_flushes_subnormals():
    for precision in ("bf16", "no"):
        with start(mixed_precision=precision) as run:
            assert run.accelerator.mixed_precision == precision
            assert flushes_subnormals()
    assert not flushes_subnormals()


def test_plot_that_fails_keeps_results_and_other_plots(capsys):
    drawn = []

    def fail(*_):
        raise RuntimeError("no fonts")

    def draw(folder, results):
        drawn.append((folder, results["steps"], (folder / "summary.txt").exists()))
        return {}

    with start() as run:
        run.draw_at_finish(fail)
        run.draw_at_finish(draw)
        run.draw_at_finish(draw)
        assert run.finish({"steps": 1})["steps"] == 1
    assert drawn == [(run.folder, 1, True)]
    assert "no plots (RuntimeError: no fonts)" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "failed"), [(None, False), (Preempted("later"), False), (RuntimeError("bug"), True)])
def test_trackers_are_closed_with_outcome_of_run(error, failed):
    tracker, run = mock.Mock(), start()
    run._trackers = [tracker]
    try:
        with run:
            if error is not None:
                raise error
    except (Preempted, RuntimeError):
        pass
    tracker.close.assert_called_once_with(failed=failed)


def full(*_):
    raise OSError(28, "No space left on device", "results.json")


def test_finish_on_full_disk_raises_user_error(tmp_path, monkeypatch):
    with start(run_dir=tmp_path) as run:
        monkeypatch.setattr("toolkit.run.run.write_json", full)
        with pytest.raises(UserError, match=r"results.json: No space left on device\."):
            run.finish({"steps": 20})


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit("killed")])
def test_run_that_ends_while_drawing_plots_is_completed_on_resume(tmp_path, error):
    with start(run_dir=tmp_path) as run:
        run.draw_at_finish(mock.Mock(side_effect=error))
        with pytest.raises(type(error)):
            run.finish({"steps": 20})
    assert (tmp_path / "results.json").exists()
    drawn = []
    with start(run_dir=tmp_path) as run:
        assert run.continues
        run.draw_at_finish(lambda _, results: drawn.append(results["steps"]) or {})
        assert run.finish({"steps": 20})["steps"] == 20
    assert drawn == [20]
    with pytest.raises(UserError, match=FINISHED):
        start(run_dir=tmp_path)


def test_console_output_on_full_disk_does_not_end_run(monkeypatch):
    with start() as run, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", mock.Mock(write=full))
        run.print("a line")


def test_closed_pipe_of_console_output_warns_once(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, start() as run, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        run.print("a line")
        run.print("another")
    assert capsys.readouterr().err.count("the reader of the output is gone: the run goes on") == 1


def test_log_writes_metrics_at_once_and_restart_overwrites_them(tmp_path):
    for loss in (1.0, 2.0):
        with start(run_dir=tmp_path) as run:
            run.log({"train/loss": loss, "moe/load/block": [0.25, 0.75]}, 10)
            (line,) = read_metrics(tmp_path / "metrics.jsonl")
            assert line == {"step": 10, "train/loss": loss, "moe/load/block": [0.25, 0.75]}


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class RecipeConfig(ExpertRunConfig):
    clip: float | None = None
    colour: Colour = Colour.BLUE


def test_resume_with_other_config_raises_with_field(tmp_path):
    settings = RecipeConfig(tracker="none", cpu=True, run_dir=tmp_path)
    with start_run("toy", settings) as run:
        run.log({"loss": 1.0}, 1)
    for changes, message in (
        (
            {"optimizer": OptimizerOptions(weight_decay=0.5)},
            r"optimizer.weight_decay=0.5: .* with 0.01: .* another run",
        ),
        ({"clip": 2.0}, "clip=2.0: the run in .* was started with None:"),
        ({"colour": Colour.RED}, "colour='r': the run in .* was started with b:"),
    ):
        with pytest.raises(UserError, match=message):
            start_run("toy", settings.replace(**changes))
    with pytest.raises(UserError, match="a run of the recipe toy"):
        start_run("other", settings)
    with start_run("toy", settings.replace(num_workers=3, log_every=7, exchange="hierarchical")) as run:
        assert run.continues


def test_run_without_steps_restarts_with_other_settings(tmp_path):
    for weight_decay in (0.5, 0.1):
        with start(run_dir=tmp_path, optimizer=OptimizerOptions(weight_decay=weight_decay)) as run:
            assert not run.continues
        assert json.loads((tmp_path / "config.json").read_text())["optimizer"]["weight_decay"] == weight_decay
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    with pytest.raises(UserError, match=r"was started with 0.1"):
        start(run_dir=tmp_path)


def test_resume_yes_without_run_dir_continues_newest_run(tmp_path):
    for name in ("b", "a"):
        start(run_dir=tmp_path / "runs" / "toy" / name).close()
    start("other").close()
    with start(resume="yes") as run:
        assert run.folder.name == "a"


@pytest.mark.parametrize("damaged", ["", "{", "[]", "\0" * 100])
def test_damaged_config_is_written_again_with_warning(damaged, tmp_path, capsys):
    start(run_dir=tmp_path).close()
    (tmp_path / "config.json").write_text(damaged)
    with start(run_dir=tmp_path) as run:
        assert run.continues
        assert (tmp_path / "config.json").read_text() == damaged
        run.begin()
    assert f"warning: {tmp_path / 'config.json'} is damaged and is written again" in capsys.readouterr().out
    assert json.loads((tmp_path / "config.json").read_text())["recipe"] == "toy"


def errors_and_shared_values(folder):
    values = []
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
        for changes in ({"batch_size": 63}, {"run_dir": folder / "file" / "run"}, {"tracker": "tensorboard"}):
            with pytest.raises(UserError) as error:
                start(**changes)
            values.append(str(error.value))
    os.chdir(folder)
    with start() as run:
        values.append(str(run.folder))
        values.append(str(run.on_main_and_share(os.getpid)))
        for failure in (ZeroDivisionError("later"), MemoryError("later"), Preempted("later")):
            with pytest.raises((type(failure), RuntimeError), match="later"):
                run.on_main_and_share(mock.Mock(side_effect=failure))
        run.log({"train/loss": 1.0}, 1)
        values.append(str(run.finish({"steps": 1})["finished_at"]))
    assert dist.is_initialized(), "the run must not destroy a process group that it did not create"
    return values


def test_ranks_share_folder_values_and_errors(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = run_distributed(errors_and_shared_values, 2, tmp_path)
    assert first == second
    assert "batch_size=63" in first[0]
    assert len(list(read_metrics(Path(first[3]) / "metrics.jsonl"))) == 1


DIFFERENCES = [
    ({"lr": 0.5}, {}, "abc", "lr="),
    ({"optimizer": OptimizerOptions(weight_decay=0.5)}, {}, "abc", "optimizer.weight_decay="),
    ({}, {"torch": "1.0"}, "abc", "torch="),
    ({}, {}, "abc-modified", "git_revision="),
    ({"data_dir": Path("elsewhere")}, {"python": "3.0"}, "abc", ""),
]
"""Settings, versions and commit of rank 1, and the start of the error."""


def errors_of_differences(folder):
    os.chdir(folder)
    versions, errors = provenance.versions(), []
    for changes, changed_versions, revision, _ in DIFFERENCES:
        if dist.get_rank() == 0:
            changes, changed_versions, revision = {}, {}, "abc"
        provenance.versions = partial(dict, versions | changed_versions)
        provenance.git_revision = partial(str, revision)
        errors.append(error_of(lambda changes=changes: start(**changes).close()))
    return errors


def test_start_run_with_different_ranks_raises_on_all(tmp_path):
    first, second = run_distributed(errors_of_differences, 2, tmp_path)
    assert first == second
    for error, (*_, field) in zip(first, DIFFERENCES, strict=True):
        assert error.startswith(field) if field else not error


def test_write_json_keeps_file_name_that_is_not_utf_8(tmp_path):
    write_json(tmp_path / "facts.json", {"file": "caf\udce9"})
    assert json.loads((tmp_path / "facts.json").read_text(encoding="utf-8")) == {"file": "caf\udce9"}


@pytest.mark.parametrize("name", ["metrics.jsonl", "lifecycle.jsonl"])
def test_link_in_run_folder_raises(tmp_path, name):
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").touch()
    symlink_to_file(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name}: is a link, and the run would write to its target. Remove it"):
        start(run_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoints", name, f"{name}.precious"]


def train_on_changed_data(folder, rows):
    """Resume the small run on its first `rows` rows, with one other label."""
    with small_trainer(small_config(folder)) as trainer:
        columns = {name: column[:rows].clone() for name, column in trainer.batches.table.columns.items()}
        columns["label"][0] = (columns["label"][0] + 1) % 3
        trainer.batches.table = tk.TensorTable(**columns)
        trainer.fit()


def test_resume_on_other_data_raises(tmp_path):
    small = small_config(tmp_path / "run")
    with preempted_at(7):
        train(small)
    message = r"started with train data of 95 rows .*, not of 94 rows .*\. Give the dataset"
    with pytest.raises(tk.UserError, match=message):
        train_on_changed_data(small.run_dir, 94)
    with pytest.raises(tk.UserError, match="started with train data of 95 rows"):
        train_on_changed_data(small.run_dir, 95)
    written = small.run_dir / "config.json"
    identity = json.loads(written.read_text())["data_identity"]
    assert (identity["train"]["rows"], identity["test"]["rows"]) == (95, 95)
    written.unlink()
    with pytest.raises(tk.UserError, match="it was made with train data of 95 rows"):
        train_on_changed_data(small.run_dir, 95)
    train(small)


def error_of_rank(folder):
    """Return the error of a rank whose data differ from rank 0."""
    small = small_config(folder, num_processes=2)
    with tk.start_run("small", small) as run, pytest.raises(tk.UserError) as error:
        record_data(run, train=identity_of(tk.TensorTable(label=torch.arange(4 + dist.get_rank()))))
    return str(error.value)


def test_different_data_on_ranks_raise_on_every_rank(tmp_path):
    first, second = run_distributed(error_of_rank, 2, tmp_path / "run")
    assert first == second
    assert "process 0 has train data of 4 rows" in first
    assert "5 rows" in first
