"""The run folder: who may use it, what continues, what it says."""

from __future__ import annotations

import json
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import run_distributed
from toolkit.errors import Preempted, UserError
from toolkit.run import provenance
from toolkit.run.config.experts import ExpertRunConfig
from toolkit.run.config.optimizer_options import OptimizerOptions
from toolkit.run.config.run import RunConfig
from toolkit.run.process_settings import flushes_subnormals
from toolkit.run.run import start_run
from toolkit.run.tracking.jsonl import read_metrics


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config(**changes) -> RunConfig:
    return RunConfig(tracker="none", cpu=True).replace(**changes)


def test_a_run_without_a_folder_gets_a_new_one_named_by_recipe_and_time(tmp_path):
    folders = []
    for _ in range(2):
        with start_run("toy", config()) as run:
            folders.append(run.folder)
    assert {folder.parent for folder in folders} == {tmp_path / "runs" / "toy"}
    assert len(set(folders)) == 2
    assert run.checkpoints == run.folder / "checkpoints"


def test_other_data_than_asked_for_is_said_at_once_and_once(tmp_path, capsys):
    notice = "No MNIST (dataset='mnist' says why): training on digits."
    with start_run("toy", config(run_dir=tmp_path / "r")) as run:
        run.describe(dataset="digits", dataset_notice=notice)
        said = capsys.readouterr().out
        assert "No MNIST (--dataset mnist says why): training on digits." in said.splitlines()
        run.describe(dataset="digits", dataset_notice=notice)  # as `fit` does of what a recipe has described
        run.finish({"steps": 3})
    assert "MNIST" not in capsys.readouterr().out
    assert f"digits ({notice})" in (tmp_path / "r" / "summary.txt").read_text()


def test_run_finish_writes_config_results_and_summary(tmp_path):
    with start_run("toy", config(run_dir=tmp_path / "r", lr=0.5)) as run:
        run.describe(dataset="rule", dataset_notice="made up", ep_size=2)
        returned = run.finish({"test_accuracy": 0.5, "steps": 3, "samples": 1920})
    written = json.loads((run.folder / "config.json").read_text())
    assert (written["recipe"], written["lr"], written["optimizer"]["weight_decay"]) == ("toy", 0.5, 0.01)
    results = json.loads((run.folder / "results.json").read_text())
    assert results == returned
    expected = {"recipe": "toy", "dataset": "rule", "test_accuracy": 0.5, "seed": 0, "world_size": 1, "ep_size": 2}
    assert results | expected == results
    assert results["torch_version"] == torch.__version__
    assert {"wall_seconds", "git_revision", "finished_at", "device", "toolkit_version"} <= results.keys()
    summary = (run.folder / "summary.txt").read_text()
    facts = ("toy", "rule (made up)", "50.00%", "3 steps, 1,920 samples", "expert parallelism over 2")
    for fact in (*facts, str(run.folder)):
        assert fact in summary


def test_the_seed_fixes_torch_numpy_and_python():
    draws = []
    for seed in (1, 1, 2):
        with start_run("toy", config(seed=seed)):
            draws.append((torch.rand(()).item(), np.random.rand(), random.random()))
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))


@pytest.mark.parametrize("before", [False, True])
def test_subnormal_numbers_are_flushed_only_while_a_run_lasts(before):
    torch.set_flush_denormal(before)
    try:
        with start_run("recipe", config()):
            assert flushes_subnormals()
        assert flushes_subnormals() == before
    finally:
        torch.set_flush_denormal(False)


def test_lines_of_metrics_are_on_disk_before_the_run_ends():
    with start_run("toy", config()) as run:
        run.log({"train/loss": 0.5, "moe/load/block": [0.25, 0.75]}, 10)
        (line,) = read_metrics(run.folder / "metrics.jsonl")
    assert line == {"step": 10, "train/loss": 0.5, "moe/load/block": [0.25, 0.75]}


def test_a_second_job_on_a_folder_is_refused(tmp_path):
    with start_run("toy", config(run_dir=tmp_path)), pytest.raises(UserError, match="another job uses this folder"):
        start_run("toy", config(run_dir=tmp_path))
    with start_run("toy", config(run_dir=tmp_path)) as run:
        assert run.continues


def test_the_same_command_continues_an_unfinished_run_in_one_unbroken_record(tmp_path):
    with start_run("toy", config(run_dir=tmp_path)) as run:
        for step in (10, 20, 30):
            run.log({"train/loss": 1.0}, step)
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 40, "train/l')
    with start_run("toy", config(run_dir=tmp_path, log_every=5)) as run:
        run.truncate_metrics(20)
        run.log({"train/loss": 2.0}, 25)
        run.log({"train/loss": 2.0}, 30)
    assert [(line["step"], line["train/loss"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (10, 1.0),
        (20, 1.0),
        (25, 2.0),
        (30, 2.0),
    ]


def test_a_run_that_begins_anew_in_its_folder_writes_its_record_anew(tmp_path):
    for loss in (1.0, 2.0):
        with start_run("toy", config(run_dir=tmp_path)) as run:
            run.log({"train/loss": loss}, 10)
    assert [line["train/loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2.0]


def test_another_config_is_not_a_continuation_and_the_field_is_named(tmp_path):
    with start_run("toy", config(run_dir=tmp_path)) as run:
        run.log({"loss": 1.0}, 1)
    changed = run.config.replace(optimizer=run.config.optimizer.replace(weight_decay=0.5))
    with pytest.raises(UserError, match=r"optimizer.weight_decay=0.5: .* started with 0.01: .* another run_dir"):
        start_run("toy", changed)
    with pytest.raises(UserError, match="a run of the recipe toy"):
        start_run("other", run.config)
    start_run("toy", run.config.replace(num_workers=3, log_every=7)).close()


def test_a_run_that_made_no_step_begins_anew_with_other_settings(tmp_path):
    for weight_decay in (0.5, 0.1):
        wanted = config(run_dir=tmp_path, optimizer=OptimizerOptions(weight_decay=weight_decay))
        with start_run("toy", wanted) as run:
            assert not run.continues
        assert json.loads((tmp_path / "config.json").read_text())["optimizer"]["weight_decay"] == weight_decay
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    with pytest.raises(UserError, match=r"was started with 0.1"):
        start_run("toy", config(run_dir=tmp_path))


def test_how_tokens_reach_experts_may_change(tmp_path):
    settings = {"run_dir": tmp_path, "tracker": "none", "cpu": True}
    start_run("toy", ExpertRunConfig(**settings)).close()
    with start_run("toy", ExpertRunConfig(**settings, exchange="hierarchical")) as run:
        assert run.continues


def test_a_finished_run_is_not_run_again(tmp_path):
    with start_run("toy", config(run_dir=tmp_path)) as run:
        run.finish({})
    for resume in ("auto", "yes"):
        with pytest.raises(UserError, match=r"has a finished run\. Choose another"):
            start_run("toy", config(run_dir=tmp_path, resume=resume))


def test_a_run_that_is_killed_before_its_pictures_are_drawn_is_completed_by_the_same_command(tmp_path):
    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with start_run("toy", config(run_dir=tmp_path)) as run:
        run.draw_at_finish(die)
        with pytest.raises(Killed):
            run.finish({"steps": 1})
    assert (tmp_path / "results.json").exists()
    drawn = []
    with start_run("toy", config(run_dir=tmp_path)) as run:
        assert run.continues
        run.draw_at_finish(lambda _, results: drawn.append(results["steps"]) or {})
        run.finish({"steps": 1})
    assert drawn == [1]
    with pytest.raises(UserError, match="has a finished run"):
        start_run("toy", config(run_dir=tmp_path))


def test_a_folder_that_is_removed_in_mid_run_is_written_again_at_the_end(tmp_path, capsys):
    folder = tmp_path / "run"
    with start_run("toy", config(run_dir=folder)) as run:
        run.log({"train/loss": 1.0}, 10)
        shutil.rmtree(folder)
        run.log({"train/loss": 0.5}, 20)
        run.finish({"steps": 20})
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [10, 20]
    assert {"config.json", "results.json", "summary.txt"} <= {path.name for path in folder.iterdir()}
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(said) == 2, said


def full(*_: object) -> None:
    raise OSError(28, "No space left on device", "results.json")


def test_finish_on_a_full_disk_raises_user_error(tmp_path, monkeypatch):
    with start_run("toy", config(run_dir=tmp_path)) as run:
        monkeypatch.setattr("toolkit.run.run.write_json", full)
        with pytest.raises(UserError, match=r"results.json: No space left on device\."):
            run.finish({"steps": 20})


def test_run_whose_plots_find_no_room_is_completed_by_the_same_command(tmp_path):
    with start_run("toy", config(run_dir=tmp_path)) as run:
        run.draw_at_finish(full)
        with pytest.raises(OSError, match="No space left on device"):
            run.finish({"steps": 20})
    with start_run("toy", config(run_dir=tmp_path)) as run:
        assert run.finish({"steps": 20})["steps"] == 20
    with pytest.raises(UserError, match="has a finished run"):
        start_run("toy", config(run_dir=tmp_path))


def test_a_console_log_on_a_full_disk_does_not_end_the_run(monkeypatch):
    class Full:
        def write(self, _):
            raise OSError(28, "No space left on device")

    with start_run("toy", config()) as run, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Full())
        run.print("a line")


def test_resume_no_refuses_a_used_folder(tmp_path):
    start_run("toy", config(run_dir=tmp_path, resume="no")).close()
    with pytest.raises(UserError, match="resume='no'"):
        start_run("toy", config(run_dir=tmp_path, resume="no"))


def test_resume_yes_takes_the_newest_run_of_the_recipe_and_refuses_to_begin_one(tmp_path):
    with pytest.raises(UserError, match="resume='yes': no run in"):
        start_run("toy", config(resume="yes"))
    with pytest.raises(UserError, match="resume='yes': no run in"):
        start_run("toy", config(resume="yes", run_dir=tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()
    for name in ("b", "a"):
        start_run("toy", config(run_dir=tmp_path / "runs" / "toy" / name)).close()
    start_run("other", config()).close()
    with start_run("toy", config(resume="yes")) as run:
        assert run.folder.name == "a"


@pytest.mark.parametrize("damaged", ["", "{", "[]", "\0" * 100])
def test_a_damaged_config_is_written_anew_and_said(damaged, tmp_path, capsys):
    start_run("toy", config(run_dir=tmp_path)).close()
    (tmp_path / "config.json").write_text(damaged)
    with start_run("toy", config(run_dir=tmp_path)) as run:
        assert run.continues
        assert (tmp_path / "config.json").read_text() == damaged
        run.begin()
    assert f"warning: {tmp_path / 'config.json'} is damaged and is written again" in capsys.readouterr().out
    assert json.loads((tmp_path / "config.json").read_text())["recipe"] == "toy"


def test_fp16_on_a_cpu_is_refused():
    with pytest.raises(UserError, match=r"mixed_precision='fp16': .*bf16"):
        start_run("toy", config(mixed_precision="fp16"))


def test_start_run_num_processes_without_launcher_raises(tmp_path):
    with pytest.raises(UserError, match="num_processes=2: only the command of a recipe starts processes"):
        start_run("test", RunConfig(cpu=True, run_dir=tmp_path, num_processes=2))


@pytest.mark.parametrize("other", [False, True])
def test_run_that_fails_before_it_begins_leaves_no_folder(tmp_path, other):
    folder = tmp_path / "run"
    run = start_run("toy", config(run_dir=folder))
    if other:
        (folder / "notes.txt").write_text("mine")
    run.close(failed=True)
    assert folder.exists() == other


def test_a_fault_in_a_picture_loses_neither_the_results_nor_other_pictures(capsys):
    drawn = []

    def fail(*_):
        raise RuntimeError("no fonts")

    def draw(folder, results):
        drawn.append((folder, results["steps"], (folder / "summary.txt").exists()))
        return {}

    with start_run("toy", config()) as run:
        run.draw_at_finish(fail)
        run.draw_at_finish(draw)
        run.draw_at_finish(draw)
        assert run.finish({"steps": 1})["steps"] == 1
    assert drawn == [(run.folder, 1, True)]
    assert "no plots (RuntimeError: no fonts)" in capsys.readouterr().out


def test_a_fact_that_is_a_function_is_called_when_the_run_ends():
    now = "at first"
    with start_run("toy", config()) as run:
        run.describe(where=lambda: now)
        assert run.facts["where"] == "at first"
        now = "at last"
        assert run.finish({})["where"] == "at last"


@pytest.mark.parametrize(("error", "failed"), [(None, False), (Preempted("later"), False), (RuntimeError("bug"), True)])
def test_trackers_learn_whether_the_run_failed(error, failed):
    heard = []

    class Tracker:
        def close(self, *, failed):
            heard.append(failed)

    run = start_run("toy", config())
    run._trackers = [Tracker()]
    try:
        with run:
            if error is not None:
                raise error
    except (Preempted, RuntimeError):
        pass
    assert heard == [failed]


# --- several processes ---------------------------------------------------------------------------------------------


def _refusals_and_agreement(folder: str) -> list[str]:
    said = []
    for changes in ({"batch_size": 63}, {"run_dir": Path(folder) / "file" / "run"}, {"tracker": "tensorboard"}):
        import importlib.util

        find, importlib.util.find_spec = importlib.util.find_spec, lambda *_: None
        try:
            start_run("toy", config(**changes))
        except UserError as error:
            said.append(str(error))
        finally:
            importlib.util.find_spec = find
    os.chdir(folder)
    with start_run("toy", config()) as run:
        said.append(str(run.folder))
        said.append(str(run.on_main_and_share(lambda: os.getpid())))
        try:
            run.on_main_and_share(lambda: 1 // 0)
        except (ZeroDivisionError, RuntimeError) as error:
            said.append("division" if "division" in str(error) else "?")
        run.log({"train/loss": 1.0}, 1)
        said.append(str(run.finish({"steps": 1})["finished_at"]))
    assert dist.is_initialized(), "the process group belongs to whoever made it"
    return said


def test_ranks_share_one_folder_refuse_alike_and_hear_of_the_main_process_failing(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = run_distributed(_refusals_and_agreement, 2, str(tmp_path))
    assert first == second
    assert "batch_size=63" in first[0]
    assert first[5] == "division"
    assert len(list(read_metrics(Path(first[3]) / "metrics.jsonl"))) == 1


def _start(changes: dict[str, Any], versions: dict[str, str], revision: str) -> str:
    """Start a run in which rank 1 has `changes`, `versions` and the commit `revision`; return the error."""
    if dist.get_rank() == 1:
        provenance.versions = partial(dict, provenance.versions() | versions)
        provenance.git_revision = lambda: revision
    else:
        provenance.git_revision = lambda: "abc"
    try:
        start_run("toy", config(**(changes if dist.get_rank() == 1 else {}))).close()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "versions", "revision", "field"),
    [
        ({"lr": 0.5}, {}, "abc", "lr"),
        ({"optimizer": OptimizerOptions(weight_decay=0.5)}, {}, "abc", "optimizer.weight_decay"),
        ({}, {"torch": "1.0"}, "abc", "torch"),
        ({}, {}, "abc-modified", "git_revision"),
        ({"data_dir": Path("elsewhere")}, {"python": "3.0"}, "abc", None),
    ],
)
def test_start_run_ranks_differ_raises_on_all(tmp_path, monkeypatch, changes, versions, revision, field):
    monkeypatch.chdir(tmp_path)
    first, second = run_distributed(_start, 2, changes, versions, revision)
    assert first == second
    assert first.startswith(f"{field}=") if field else not first


@pytest.mark.parametrize("name", ["chapter.txt", "metrics.jsonl", "config.json", "checkpoints/best.pt"])
def test_a_folder_of_other_files_is_refused_and_left_as_it_was(name, tmp_path):
    path = tmp_path / "thesis" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"one": 1}')
    with pytest.raises(UserError, match=r"run_dir=.*thesis: it holds other files and no run"):
        start_run("toy", config(run_dir=tmp_path / "thesis"))
    assert [file for file in (tmp_path / "thesis").rglob("*") if file.is_file()] == [path]


def test_the_time_of_a_run_does_not_jump_with_the_clock(tmp_path, monkeypatch):
    with start_run("toy", config(run_dir=tmp_path)) as run:
        monkeypatch.setattr("time.time", lambda: 0.0)
        assert run.finish({})["wall_seconds"] >= 0


def test_a_reader_that_has_enough_of_the_console_log_does_not_end_the_run(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, start_run("toy", config()) as run, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        run.print("a line")
        run.print("another")
    assert capsys.readouterr().err.count("the reader of the output is gone: the run goes on") == 1


def test_two_runs_of_one_process_may_differ_in_precision():
    for precision in ("bf16", "no"):
        with start_run("toy", config(mixed_precision=precision)) as run:
            assert run.accelerator.mixed_precision == precision
