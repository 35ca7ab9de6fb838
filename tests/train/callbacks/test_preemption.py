"""A signal to any rank stops all of them at one step, with a checkpoint, and nothing waits for it."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import toolkit as tk
from tests.support.forked_python import ForkedPython, run_forked
from tests.support.helpers import run_distributed
from tests.support.small_run import STEPS, Stop, small_config, small_trainer, train
from toolkit.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted
from toolkit.experts.state import checkpoint_files
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.tracking.jsonl import read_metrics


@pytest.fixture(autouse=True)
def handlers():
    """Handlers that no test may leave changed for the next, and no signal may reach."""
    mine = {number: signal.signal(number, lambda *_: pytest.fail("reached")) for number in (15, signal.SIGUSR1)}
    yield {number: signal.getsignal(number) for number in mine}
    for number, handler in mine.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def command(monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "mine.py"])


def during(hook: str, *, step: int = 10, times: int = 1) -> tk.Callback:
    """A callback that sends this process SIGTERM from within `hook`, `times` times, at `step`."""

    def send(_: tk.Callback, trainer: tk.Trainer, *__: object) -> None:
        for _ in range(times if trainer.state.step == step else 0):
            os.kill(os.getpid(), signal.SIGTERM)

    return type("During", (tk.Callback,), {hook: send})()


@pytest.mark.parametrize(
    ("hook", "stops_at"),
    [
        ("on_step_start", 11),
        ("on_before_optimizer_step", 11),
        ("on_step_end", 10),
        ("on_evaluate_end", 10),
        ("on_save", 11),
    ],
)
def test_a_signal_at_any_moment_of_training_ends_it_at_the_next_boundary(hook, stops_at, tmp_path):
    config = small_config(tmp_path / "run")
    with (
        pytest.raises(Preempted, match=f"stopped by SIGTERM at step {stops_at}; run `python mine.py` to continue"),
        small_trainer(config, callbacks=[during(hook)]) as trainer,
    ):
        trainer.fit()
    assert (config.run_dir / "checkpoints" / f"step-{stops_at:08d}").exists()


def test_a_second_signal_changes_nothing(tmp_path):
    with (
        pytest.raises(Preempted, match="stopped by SIGTERM at step 10;"),
        small_trainer(
            small_config(tmp_path / "run"), callbacks=[during("on_step_end", times=3), during("on_save")]
        ) as trainer,
    ):
        trainer.fit()
    os.kill(os.getpid(), signal.SIGTERM)  # on the way out


def test_ctrl_c_saves_says_how_to_go_on_and_a_second_one_ends_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Preempted) as stopped, small_trainer(small_config(None), Stop(10, "SIGINT")) as trainer:
        trainer.fit()
    folder = trainer.run.folder
    assert stopped.value.code == EXIT_INTERRUPTED
    command = f"run `python mine.py --run-dir {folder}` to continue."
    assert str(stopped.value) == f"stopped by SIGINT at step 10; {command}"
    assert (folder / "checkpoints" / "step-00000010").exists()
    assert "saving at the end of this step; Ctrl-C again ends at once\n" in capsys.readouterr().out
    lost = "stopped by Ctrl-C: steps since the last checkpoint are lost; run `python mine.py` to continue."
    with (
        pytest.raises(KeyboardInterrupt, match=lost),
        small_trainer(small_config(folder), callbacks=[Twice()]) as trainer,
    ):
        trainer.fit()


class Twice(tk.Callback):
    """Ctrl-C at the start of step 13, and again before its end."""

    def on_step_start(self, trainer, micro_batches):  # noqa: ARG002
        for _ in range(2 if trainer.state.step == 12 else 0):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_in_the_last_step_lets_the_run_end(tmp_path):
    with small_trainer(small_config(tmp_path / "run"), callbacks=[during("on_step_end", step=STEPS)]) as trainer:
        assert "test_accuracy" in trainer.fit()


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_was_not_stopped_puts_the_handlers_back(fails, handlers, tmp_path):
    seen = []

    class Look(tk.Callback):
        def on_step_end(self, _: tk.Trainer) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))
            if fails:
                raise RuntimeError("out of luck")

    with small_trainer(small_config(tmp_path / "run", max_steps=2), callbacks=[Look()]) as trainer:
        if fails:
            with pytest.raises(RuntimeError, match="out of luck"):
                trainer.fit()
        else:
            trainer.fit()
    assert seen[0] not in handlers.values()
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_a_stop_that_could_not_be_saved_says_where_the_run_will_continue(tmp_path, monkeypatch):
    config = small_config(tmp_path / "run", checkpoint=CheckpointOptions(every_steps=4))
    write = checkpoint_files.save_file

    def full(*args: object) -> None:
        if "step-00000004" not in str(args[1]):
            raise OSError(28, "No space left on device")
        write(*args)

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(Preempted, match=r"at step 6; run `python mine\.py` to continue from step 4, the last"):
        train(config, Stop(6, "SIGTERM"))


def test_a_stop_with_nothing_saved_is_no_promise_to_continue(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(tk.UserError, match="stopped by SIGTERM at step 6, and no checkpoint could be written to"):
        train(small_config(tmp_path / "run"), Stop(6, "SIGTERM"))


def test_a_list_in_which_nothing_saves_is_refused(tmp_path):
    with small_trainer(small_config(tmp_path / "run")) as trainer:
        del trainer.callbacks[-3]
        with pytest.raises(ValueError, match="needs Checkpointing in the list"):
            trainer.callbacks[-1].on_fit_start(trainer)


def ask_and_answer(folder: Path) -> None:
    with small_trainer(small_config(folder, batch_size=12), ep_size=2) as trainer:
        preemption = trainer.callbacks[-1]
        asked: list[int] = []
        read: list[int] = []
        ask, wait = preemption._start_reduction, preemption._read
        preemption._start_reduction = lambda: (asked.append(trainer.state.step), ask())
        preemption._read = lambda: (read.append(trainer.state.step), wait())[1]
        trainer.fit()
        assert asked == list(range(1, STEPS + 1))
        assert read == [*range(1, STEPS + 1), STEPS]
        assert preemption._pending is None
        assert dist.get_backend(preemption._group) == "gloo"
        assert preemption._group is not dist.group.WORLD


def test_ranks_ask_after_each_step_and_read_after_the_next(tmp_path):
    run_distributed(ask_and_answer, 2, tmp_path)


def test_two_processes_of_a_recipe_leave_with_75_and_continue(tmp_path):
    command = ["recipes/mnist_moe.py", "debug", "--cpu", "--num-processes", "2", "--tracker", "none"]
    command += ["--epochs", "12", "--ep-size", "2", "--run-dir", str(tmp_path / "run")]
    metrics = tmp_path / "run" / "metrics.jsonl"
    first = ForkedPython(*command)
    try:
        deadline = time.monotonic() + 120
        while not list(read_metrics(metrics)) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == EXIT_PREEMPTED, err
    assert err.startswith("stopped by SIGTERM at step ")
    assert len(err.splitlines()) == 1
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert sorted(file.name for file in newest.glob("experts-*")) == [
        f"experts-0000{rank}.safetensors" for rank in (0, 1)
    ]
    second = run_forked(*command)
    assert second.returncode == 0, second.stderr
    assert f"({newest.name} verified)" in second.stdout
    steps = [line["step"] for line in read_metrics(metrics)]
    assert steps == sorted(set(steps))
    assert steps == sorted({*range(10, 277, 10), *range(23, 277, 23)})
    assert "continuing" not in out
