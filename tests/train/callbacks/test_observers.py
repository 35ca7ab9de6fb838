"""Evaluation, throughput, progress and profile of a short run."""

import gzip
import io
import json
import os
import re
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.run.tracking.toy import train
from tests.support.special_files import symlink_to_file
from tests.support.trainers import fit, in_hook, metrics
from toolkit import progress_bar
from toolkit.run.config.run import RunConfig
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks import progress, throughput
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.trainer import TrainState


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


def advance(clock: Clock) -> list[Callback]:
    """Return callbacks for steps of one second and evaluations of a hundred."""

    def by(seconds: float) -> Any:
        return lambda *_: setattr(clock, "now", clock.now + seconds)

    return [in_hook("on_before_optimizer_step", by(1.0)), in_hook("on_evaluate_end", by(100.0))]


def config(folder: Path, **changes) -> RunConfig:
    return RunConfig(run_dir=folder, tracker="none", cpu=True, log_every=4, lr=1e-2).replace(**changes)


def test_results_are_the_last_and_the_best_evaluation(tmp_path):
    seen = []

    watch = in_hook("on_evaluate_end", lambda trainer, _, metrics: seen.append((trainer.state.step, metrics)))
    results = train(config(tmp_path), watch, epochs=3)
    assert [step for step, _ in seen] == [10, 20, 30]
    for name, best in (("loss", min), ("accuracy", max)):
        values = [metrics[f"eval/{name}"] for _, metrics in seen]
        assert (results[f"test_{name}"], results[f"best_test_{name}"]) == (values[-1], best(values))


class StubTrainer:
    def __init__(self, step: int, stop_reason: str | None = None):
        self.state = TrainState(step=step)
        self.batches = SimpleNamespace(steps_per_epoch=100)
        self.max_steps, self.stop_reason = 20, stop_reason
        self.results: dict[str, float] = {}
        self.evaluated: list[int] = []

    def evaluate(self, batches, name="eval", task=None):  # noqa: ARG002
        self.evaluated.append(self.state.step)
        return {f"{name}/accuracy": self.state.step / 100}


def test_evaluation_resumed_at_the_last_step_is_not_repeated():
    trainer = StubTrainer(20)
    before, resumed, fresh = (Evaluation(batches=None) for _ in range(3))
    before.on_step_end(trainer)
    resumed.load_state_dict(before.state_dict())
    resumed.on_fit_end(trainer)
    assert trainer.evaluated == [20]
    assert trainer.results["test_accuracy"] == 0.2
    fresh.on_fit_end(trainer)
    assert trainer.evaluated == [20, 20]


def test_stopped_run_is_not_evaluated():
    trainer = StubTrainer(7, stop_reason="SIGTERM")
    Evaluation(batches=None).on_fit_end(trainer)
    assert trainer.evaluated == []


def test_throughput_of_one_process_excludes_evaluation(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    results = train(config(tmp_path), *advance(clock))
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert {line["perf/samples_per_second"] for line in lines} == {64.0}
    for name in ("step_time_ms", "step_time_median_ms", "step_time_p95_ms", "step_time_worst_rank_ms"):
        assert {line[f"perf/{name}"] for line in lines} == {1000.0}
    assert not any("perf/slowest_rank" in line for line in lines)
    assert results["samples_per_second"] == 64.0
    assert (results["steps"], results["samples"], results["epochs"]) == (20, 1280, 2.0)
    assert results["train_seconds"] == 20.0


def test_throughput_state_dict_keeps_samples_and_seconds():
    first, second = Throughput(), Throughput()
    first._samples, first._seconds = 640.0, 10.0
    second.load_state_dict(first.state_dict())
    assert (second._samples, second._seconds) == (640.0, 10.0)


def train_with_a_slow_rank(folder: Path) -> dict[str, float]:
    def slow_down(trainer: Any) -> None:
        if trainer.run.rank == 1:
            loss = trainer.task.loss
            trainer.task.loss = lambda *given: time.sleep(0.05) or loss(*given)

    return train(config(folder, log_every=2), in_hook("on_fit_start", slow_down), epochs=1)


def test_throughput_names_the_slowest_rank(tmp_path):
    run_distributed(train_with_a_slow_rank, 2, tmp_path)
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert len(lines) == 5
    assert median(line["perf/slowest_rank"] for line in lines) == 1
    assert all(line["perf/slowest_rank_ratio"] >= 1 for line in lines)
    assert all(line["perf/exchange_ms"] == 0 for line in lines)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset")
def test_peak_memory_excludes_earlier_allocations(tmp_path):
    before = bytearray(2**29)
    before[::4096] = b"1" * 2**17  # maps every page
    filled = psutil.Process().memory_info().rss
    del before
    results = train(config(tmp_path), epochs=1)
    peak = results["peak_memory_bytes"]
    assert 0.5 * psutil.Process().memory_info().rss <= peak < filled - 2**28
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert max(line.get("perf/peak_memory_bytes", 0) for line in lines) <= peak


def step_lines(capsys) -> dict[str, str]:
    """Return the progress lines by step."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    return {line.split("/")[0].removeprefix("step").strip(): line for line in lines}


def test_progress_without_a_terminal_prints_few_lines_with_evaluations(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "time", Clock())
    train(config(tmp_path, log_every=2), epochs=2)
    lines = step_lines(capsys)
    assert list(lines) == ["2", "10", "20"]
    assert "test acc" in lines["10"]


def test_progress_estimates_the_remaining_time_from_the_first_step_on(tmp_path, capsys, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    train(config(tmp_path, log_every=5), *advance(clock), epochs=2)
    left = {step: line.partition("  eta ")[2] for step, line in step_lines(capsys).items()}
    assert left == {"5": "0:15", "10": "2:01", "15": "0:41", "20": ""}


def test_progress_on_a_terminal_of_80_columns_shows_and_erases_a_bar(tmp_path, capsys, monkeypatch):
    drawn = io.StringIO()
    monkeypatch.setattr(progress_bar, "bar_options", lambda: {"file": drawn, "leave": False})
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    monkeypatch.setattr(sys, "__stderr__", drawn)
    monkeypatch.setenv("COLUMNS", "80")
    train(config(tmp_path), in_hook("on_step_end", lambda _: sys.stderr.write("of the user\n")), epochs=1)
    frames = re.split(r"[\r\n]", drawn.getvalue())
    bars = [frame for frame in frames if "step " in frame]
    assert len(bars) > 5
    assert all(re.match(r".{20} step +\d+/10 .*\d\d:\d\d<[\d?]", bar) and len(bar) <= 80 for bar in bars)
    assert frames.count("of the user") == 10
    assert frames[-2:] == [" " * len(bars[-1].rstrip()), ""]
    assert "test acc" in drawn.getvalue() + capsys.readouterr().out


TABLE = tk.TensorTable(input=torch.linspace(-1, 1, 512 * 16).view(512, 16), label=torch.arange(512) % 3)


def profiled(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Return the metrics of eight steps."""
    torch.manual_seed(0)
    fit(folder, tk.MLP(16, 3), TABLE, batch_size=64, log_every=4, **settings)
    return metrics(folder)


def test_profile_writes_traces_and_does_not_change_training(tmp_path, capsys):
    folder = tmp_path / "with" / "profile"
    folder.mkdir(parents=True)
    (tmp_path / "with" / ".lock").touch()  # marks a run folder
    precious = symlink_to_file(folder / "trace-rank-00000.json.gz")
    assert profiled(tmp_path / "with", profile=True) == profiled(tmp_path / "without")
    assert precious.read_text() == "precious"
    assert "profile in " in capsys.readouterr().out
    with gzip.open(folder / "trace-rank-00000.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 5
    assert "aten::addmm" in names
    assert "aten::addmm" in (folder / "operations-rank-00000.txt").read_text()
    assert not (tmp_path / "without" / "profile").exists()


def test_profile_of_a_short_run_warns(tmp_path, capsys):
    profiled(tmp_path, profile=True, max_steps=1)
    assert "the run has too few steps" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()
