"""A run that hangs ends with the name of the rank it waits for, and may restart from its checkpoint."""

import json
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.support.processes import program_environment
from tests.support.forked_python import run_forked
from tests.support.trainers import learned
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks.watchdog import LEARN_STEPS, Report, Watchdog, what_ranks_do
from toolkit.train.trainer import Trainer

RECIPE = '''
"""A small run that hangs."""
import json, os, signal, sys, time
from pathlib import Path
import toolkit as tk
from tests.support.special_files import symlink_to_file
from tests.support.small_run import SmallConfig, Stop, small_trainer
from toolkit.train.callbacks.watchdog import Watchdog
from toolkit.run.launch.restarts import past_restarts

class Sleeps(tk.Callback):
    def on_step_end(self, trainer):
        if trainer.state.step == 7 and trainer.run.rank == 1:
            trainer.task.loss = lambda *_: time.sleep(600)

class Hangs(tk.Callback):
    """Hangs in the hook $WITH."""
    def on_fit_start(self, trainer):
        if os.environ["WITH"] == "on_evaluate_end":
            (trainer.run.folder / "hang").mkdir()
            for name in ("rank-00000.partial", ".rank-00000.txt.partial", "rank-00000.txt"):
                symlink_to_file(trainer.run.folder / "hang" / name)

    def on_evaluate_end(self, *_):
        time.sleep(600 * (os.environ["WITH"] == "on_evaluate_end"))

    def on_fit_end(self, *_):
        time.sleep(600 * (os.environ["WITH"] == "on_fit_end"))

def draw(folder, results):
    time.sleep(600)

def main(config):
    first = not past_restarts()
    stop = Stop(7, "SIGSTOP", rank=1) if first and os.environ.get("WITH") == "SIGSTOP" else None
    more = {"sleep": [Sleeps()]}.get(os.environ["WITH"], [Hangs()]) if first else []
    watchdog = Watchdog(limit_s=config.step_timeout, longest_s=60 * config.process_timeout)
    with small_trainer(config, stop, ep_size=config.num_processes, callbacks=[*more, watchdog]) as trainer:
        results = trainer.fit()
        if os.environ["WITH"] == "draw":
            trainer.save()
            trainer.evaluate(trainer.callbacks[2].batches)
            time.sleep(6)  # a recipe may work for longer than the limit after training
            trainer.run.draw_at_finish(draw)
        trainer.run.finish(results)

if __name__ == "__main__":
    sys.modules["__main__"].SmallConfig = SmallConfig
    def full():
        """Default settings."""
        return SmallConfig(batch_size=10, epochs=2, lr=0.02, log_every=3, tracker="none", cpu=True, num_processes=2)
    tk.run_recipe(main, {"full": full}, __doc__)
'''


def run(folder: Path, hangs_in: str, *flags: str) -> subprocess.CompletedProcess[str]:
    recipe = folder.parent / "small.py"
    recipe.write_text(RECIPE)
    words = [str(recipe), "--run-dir", str(folder), "--checkpoint.every-steps", "5", *flags]
    return run_forked(*words, env=program_environment(WITH=hangs_in), timeout_s=120)


def test_restart_after_a_hang_is_bitwise_identical(tmp_path):
    expected, folder = tmp_path / "undisturbed", tmp_path / "run"
    done = run(expected, "nothing", "--step-timeout", "60")
    assert done.returncode == 0, done.stderr
    assert not (expected / "hang").exists()
    assert json.loads((expected / "results.json").read_text())["restarts"] == []
    done = run(folder, "SIGSTOP", "--max-restarts", "1", "--step-timeout", "2")
    assert done.returncode == 0, done.stderr
    named = "rank 1 of 2 does not answer: it is stopped, frozen or gone."
    assert any(line.startswith(f"error: {named}") for line in done.stderr.splitlines()), done.stderr
    assert "Traceback" not in done.stderr
    (restart,) = [line for line in read_metrics(folder / "metrics.jsonl") if "run/restarts" in line]
    assert restart["run/restart_reason"].startswith(named)
    assert len(json.loads((folder / "results.json").read_text())["restarts"]) == 1
    assert "restarts" in (folder / "summary.txt").read_text()
    assert learned(folder) == learned(expected)


def test_late_rank_is_named_and_all_stacks_are_written(tmp_path):
    done = run(tmp_path / "run", "sleep", "--step-timeout", "2")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    number = 1 + next(n for n, text in enumerate(RECIPE.splitlines()) if "lambda *_: time.sleep" in text)
    assert "rank 1 of 2 in <lambda> (" in line
    assert f"small.py:{number})" in line
    waiting, late = (tmp_path.joinpath("run", "hang", f"rank-0000{rank}.txt").read_text() for rank in range(2))
    assert "small.py" in late
    assert "<lambda>" not in waiting


@pytest.mark.parametrize(("hangs_in", "processes"), [("on_evaluate_end", 1), ("on_fit_end", 1), ("draw", 2)])
def test_hang_outside_of_steps_ends_the_run(tmp_path, hangs_in, processes):
    done = run(tmp_path / "run", hangs_in, "--num-processes", str(processes), "--process-timeout", "0.1")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"rank 0 of {processes} in {hangs_in} (" in line
    assert {path.read_text() for path in tmp_path.glob("run/hang/*.precious")} <= {"precious"}
    assert "longer than 6 s (--process-timeout)" in line


def report(rank: int, **changes: object) -> Report:
    return replace(Report(rank, late=True, step=7, phase="step", frame="loss (a.py:1)"), **changes)


@pytest.mark.parametrize(
    ("reports", "silent", "expected"),
    [
        ([report(0)], [1], "rank 1 of 2 does not answer:"),
        ([report(0), report(1), report(2, step=6)], [], "on: rank 2 of 3 in loss (a.py:1), in the phase 'step' after "),
        ([report(0), report(1, late=False, frame="read (b.py:2)"), report(2)], [], "on: rank 1 of 3 in read (b.py:2)"),
        ([report(0), report(1)], [], "the run does not go on: ranks 0, 1 of 2 in loss (a.py:1)"),
    ],
)
def test_rank_activities_name_the_late_rank(reports, silent, expected):
    assert expected in what_ranks_do(reports, silent, len(reports) + len(silent))


def test_limit_follows_the_measured_step_time():
    watchdog = Watchdog(longest_s=600)
    assert watchdog.limit_of("step") == 600
    watchdog._seconds.extend([0.1] * LEARN_STEPS)
    assert watchdog.limit_of("data") == 120
    watchdog._seconds.extend([10.0] * 101)
    assert watchdog.limit_of("step") == 200
    watchdog._seconds.extend([100.0] * 101)
    assert watchdog.limit_of("step") == 600
    assert [Watchdog(limit_s=3).limit_of(phase) for phase in ("data", "callbacks", "step")] == [3, 3, 3]
    assert Watchdog(limit_s=3).limit_of("evaluation") == 600


def test_phases_of_a_step_share_a_clock(monkeypatch):
    monkeypatch.setattr("toolkit.train.trainer.time", SimpleNamespace(monotonic=iter(range(9)).__next__))
    trainer, began = SimpleNamespace(phase="start"), []
    of_a_step = ("data", "callbacks", "step", "callbacks")
    for phase in (*of_a_step, "evaluation", "evaluation", "callbacks", "checkpoint", *of_a_step, "fit end"):
        Trainer.enter(trainer, phase)
        began.append(trainer.phase_began)
    assert began == [0, 0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 5, 6]


@pytest.mark.parametrize("progresses", [True, False])
def test_rank_that_makes_progress_is_not_ended(progresses, tmp_path, monkeypatch):
    ended: list[str] = []
    monkeypatch.setattr("toolkit.train.callbacks.watchdog.end_from_a_thread", ended.append)
    run = SimpleNamespace(folder=tmp_path, rank=0, world_size=1, ranks_here=[0])
    state = SimpleNamespace(step=7)
    trainer = SimpleNamespace(run=run, state=state, phase="step", phase_began=2.0 if progresses else 1.0)
    watchdog = Watchdog()
    watchdog._main = threading.get_ident()
    watchdog._end_run(trainer, began=1.0, every=0.01, limit=5.0)
    assert bool(ended) is not progresses
    assert (tmp_path / "hang").exists() is not progresses


@pytest.mark.parametrize(("naps", "ends"), [([1.0] * 8, True), ([1.0, 1000.0], False)])
def test_suspended_process_is_not_ended(naps, ends, tmp_path, monkeypatch):
    clock, ended = [0.0], []

    def wait(_seconds: float) -> bool:
        clock[0] += naps.pop(0) if naps else 0.0
        return not naps

    monkeypatch.setattr("toolkit.train.callbacks.watchdog.time", SimpleNamespace(monotonic=lambda: clock[0]))
    watchdog = Watchdog(limit_s=5)
    naps.append(0.0)  # ends the thread
    watchdog._stop = SimpleNamespace(wait=wait)
    watchdog._end_run = lambda *reason: ended.append(reason)
    watchdog._watch(SimpleNamespace(phase="step", phase_began=0.5, run=SimpleNamespace(folder=tmp_path)))
    assert bool(ended) is ends
