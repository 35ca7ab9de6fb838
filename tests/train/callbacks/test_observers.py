"""Evaluation, throughput and progress, on a run of seconds."""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import psutil
import pytest

from tests.run.tracking.toy import train
from tests.support.helpers import run_distributed
from toolkit.run.config.run import RunConfig
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks import progress as progress_module
from toolkit.train.callbacks import throughput as throughput_module
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.trainer import TrainState


class Clock:
    """Time that moves only when told."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


class Passing(Callback):
    """A step takes one second, an evaluation a hundred."""

    def __init__(self, clock):
        self.clock = clock

    def on_before_optimizer_step(self, trainer):  # noqa: ARG002
        self.clock.now += 1.0

    def on_evaluate_end(self, trainer, name, metrics):  # noqa: ARG002
        self.clock.now += 100.0


def config(folder: Path, **changes) -> RunConfig:
    return RunConfig(run_dir=folder, tracker="none", cpu=True, log_every=4, lr=1e-2).replace(**changes)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput_module, "time", clock)
    return clock


def test_evaluations_come_at_the_end_of_each_epoch_and_the_results_are_the_last_and_the_best(tmp_path):
    seen = []

    class Watch(Callback):
        def on_evaluate_end(self, trainer, name, metrics):  # noqa: ARG002
            seen.append((trainer.state.step, metrics))

    results = train(config(tmp_path), Watch(), epochs=3)
    assert [step for step, _ in seen] == [10, 20, 30]
    assert results["test_loss"] == seen[-1][1]["eval/loss"]
    assert results["test_accuracy"] == seen[-1][1]["eval/accuracy"]
    assert results["best_test_accuracy"] == max(metrics["eval/accuracy"] for _, metrics in seen)
    assert results["best_test_loss"] == min(metrics["eval/loss"] for _, metrics in seen)


class StubTrainer:
    """As much of a trainer as an evaluation looks at."""

    def __init__(self, step: int, stop_reason: str | None = None):
        self.state = TrainState(step=step)
        self.batches = SimpleNamespace(steps_per_epoch=100)
        self.max_steps, self.stop_reason = 20, stop_reason
        self.results: dict[str, float] = {}
        self.evaluated: list[int] = []

    def evaluate(self, batches, name="eval", task=None):  # noqa: ARG002
        self.evaluated.append(self.state.step)
        return {f"{name}/accuracy": self.state.step / 100}


def test_evaluations_every_few_steps_include_the_last_step_once():
    trainer = StubTrainer(0)
    evaluation = Evaluation(batches=None, every_steps=8)
    for step in range(1, 21):
        trainer.state.step = step
        evaluation.on_step_end(trainer)
    evaluation.on_fit_end(trainer)
    assert trainer.evaluated == [8, 16, 20]
    assert trainer.results == {"test_accuracy": 0.2, "best_test_accuracy": 0.2}


def test_a_run_continued_at_its_last_step_has_its_results_without_a_second_evaluation():
    trainer = StubTrainer(20)
    before, after, late = (Evaluation(batches=None) for _ in range(3))
    before.on_step_end(trainer)
    after.load_state_dict(before.state_dict())
    after.on_fit_end(trainer)
    assert trainer.evaluated == [20]
    assert trainer.results["test_accuracy"] == 0.2
    late.on_fit_end(trainer)
    assert trainer.evaluated == [20, 20]


def test_a_run_that_was_asked_to_stop_is_not_held_up_by_an_evaluation():
    trainer = StubTrainer(7, stop_reason="SIGTERM")
    Evaluation(batches=None).on_fit_end(trainer)
    assert trainer.evaluated == []


def test_throughput_counts_training_and_not_evaluation(tmp_path, clock):
    results = train(config(tmp_path), Passing(clock))
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert {line["perf/samples_per_second"] for line in lines} == {64.0}
    for name in ("step_time_ms", "step_time_median_ms", "step_time_p95_ms", "step_time_worst_rank_ms"):
        assert {line[f"perf/{name}"] for line in lines} == {1000.0}
    assert results["samples_per_second"] == 64.0
    assert (results["steps"], results["samples"], results["epochs"]) == (20, 1280, 2.0)
    # A window ends with the epoch, before the evaluation.
    assert results["train_seconds"] == 20.0


class Sleeps(Callback):
    """Rank 1 takes its time in the forward."""

    def on_fit_start(self, trainer):
        if trainer.run.rank == 1:
            loss = trainer.task.loss
            trainer.task.loss = lambda *given: time.sleep(0.05) or loss(*given)


def a_rank_that_sleeps(folder: Path) -> dict[str, float]:
    return train(config(folder, log_every=2), Sleeps(), epochs=1)


def test_the_slowest_rank_is_named_although_all_take_equally_long(tmp_path):
    run_distributed(a_rank_that_sleeps, 2, tmp_path)
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert len(lines) == 5
    assert median(line["perf/slowest_rank"] for line in lines) == 1
    assert all(line["perf/slowest_rank_ratio"] >= 1 for line in lines)
    assert all(line["perf/exchange_ms"] == 0 for line in lines)


def test_one_process_waits_for_nobody(tmp_path):
    train(config(tmp_path), epochs=1)
    written = {name for line in read_metrics(tmp_path / "metrics.jsonl") for name in line}
    assert "perf/slowest_rank" not in written


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="a peak that cannot be reset")
def test_memory_is_that_of_this_training(tmp_path):
    before = bytearray(2**29)
    before[::4096] = b"1" * 2**17  # a page is there once it is written
    filled = psutil.Process().memory_info().rss
    del before
    results = train(config(tmp_path), epochs=1)
    peak = results["peak_memory_bytes"]
    assert 0.5 * psutil.Process().memory_info().rss <= peak < filled - 2**28
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert max(line.get("perf/peak_memory_bytes", 0) for line in lines) <= peak


def test_the_measure_goes_on_after_a_restart():
    first, second = Throughput(), Throughput()
    first._samples, first._seconds = 640.0, 10.0
    second.load_state_dict(first.state_dict())
    assert (second._samples, second._seconds) == (640.0, 10.0)


def test_without_a_terminal_lines_are_few_and_evaluations_are_among_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "time", Clock())
    train(config(tmp_path, log_every=2), epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split("/")[0] for line in lines] == ["step  2", "step 10", "step 20"]
    assert "test acc" in lines[1]


def test_lines_say_how_long_the_rest_takes_at_the_speed_since_the_first_step(tmp_path, capsys, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    train(config(tmp_path, log_every=5), Passing(clock), epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    left = {line.split("/")[0]: line.partition("  eta ")[2] for line in lines}
    # A second a step; then an evaluation of a hundred seconds before the line of step 10.
    assert left == {"step  5": "0:15", "step 10": "2:01", "step 15": "0:41", "step 20": ""}


def test_on_a_terminal_a_bar_is_drawn_on_stderr_and_is_gone_in_the_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "can_redraw", lambda: True)
    monkeypatch.setattr(progress_module, "REDRAW_S", 0.0)
    drawn = io.StringIO()
    console = progress_module.Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(progress_module, "Console", lambda **_: console)
    train(config(tmp_path), epochs=1)
    assert "━" in drawn.getvalue()
    assert drawn.getvalue().endswith("\x1b[2K"), "the bar is erased"
    assert "test acc" in drawn.getvalue() + capsys.readouterr().out


def test_on_80_columns_the_bar_and_the_time_that_is_left_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "can_redraw", lambda: True)
    monkeypatch.setattr(progress_module, "REDRAW_S", 0.0)
    monkeypatch.setenv("COLUMNS", "80")
    drawn = io.StringIO()
    console = progress_module.Console(file=drawn, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(progress_module, "Console", lambda **_: console)
    train(config(tmp_path), epochs=1)
    frames = [frame for frame in re.split(r"[\r\n]|\x1b\[\w+", drawn.getvalue()) if "step " in frame]
    assert frames
    for frame in frames:
        assert re.match(r"[━╸╺ ]{20} +step", frame)
        assert re.search(r"step +\d+/10 .*0:00:\d\d [-\d]:[-\d]{2}:[-\d]{2}$", frame.rstrip())
