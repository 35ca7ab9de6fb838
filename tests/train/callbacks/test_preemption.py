"""A signal to any rank stops all ranks at the same step with a checkpoint."""

import os
import signal
from contextlib import nullcontext

import pytest

import toolkit as tk
from tests.support.small_run import STEPS, SmallConfig, Stop, small_config, small_trainer, train
from tests.support.trainers import in_hook
from toolkit.errors import EXIT_INTERRUPTED, Preempted
from toolkit.experts.state import checkpoint_files
from toolkit.run.config.callback_options import CheckpointOptions


@pytest.fixture(autouse=True)
def handlers():
    """Handlers that every test must restore and no signal may reach."""
    before = {number: signal.signal(number, lambda *_: pytest.fail("reached")) for number in (15, signal.SIGUSR1)}
    yield {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def command(monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "mine.py"])


def send_during(hook: str, *, step: int = 10, times: int = 1, number: int = signal.SIGTERM) -> tk.Callback:
    """Return a callback that sends signals to this process in `hook` at `step`."""
    return in_hook(hook, lambda *_: [os.kill(os.getpid(), number) for _ in range(times)], step)


def train_with(config: SmallConfig, *callbacks: tk.Callback) -> None:
    with small_trainer(config, callbacks=callbacks) as trainer:
        trainer.fit()


@pytest.mark.parametrize(
    ("hook", "stops_at"),
    [
        ("on_step_start", 11),
        ("on_step_end", 10),
        ("on_evaluate_end", 10),
        ("on_save", 11),
    ],
)
def test_signal_in_any_hook_ends_training_after_the_step(hook, stops_at, tmp_path):
    config = small_config(tmp_path / "run")
    message = f"stopped by SIGTERM at step {stops_at}; run `python mine.py` to continue"
    with pytest.raises(Preempted, match=message):
        train_with(config, send_during(hook))
    assert (config.run_dir / "checkpoints" / f"step-{stops_at:08d}").exists()


def test_second_signal_has_no_effect(tmp_path):
    callbacks = [send_during("on_step_end", times=3), send_during("on_save")]
    with pytest.raises(Preempted, match="stopped by SIGTERM at step 10;"):
        train_with(small_config(tmp_path / "run"), *callbacks)
    os.kill(os.getpid(), signal.SIGTERM)  # during exit


def test_ctrl_c_saves_and_a_second_one_ends_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Preempted) as stopped, small_trainer(small_config(None), Stop(10, "SIGINT")) as trainer:
        trainer.fit()
    folder = trainer.run.folder
    assert stopped.value.code == EXIT_INTERRUPTED
    assert str(stopped.value) == f"stopped by SIGINT at step 10; run `python mine.py --run-dir {folder}` to continue."
    assert (folder / "checkpoints" / "step-00000010").exists()
    assert "saving at the end of this step; Ctrl-C again ends at once\n" in capsys.readouterr().out
    lost = "stopped by Ctrl-C: steps since the last checkpoint are lost; run `python mine.py` to continue."
    with pytest.raises(KeyboardInterrupt, match=lost):
        train_with(small_config(folder), send_during("on_step_start", step=12, times=2, number=signal.SIGINT))


def test_signal_in_the_last_step_lets_the_run_end(tmp_path):
    config = small_config(tmp_path / "run")
    with small_trainer(config, callbacks=[send_during("on_step_end", step=STEPS)]) as trainer:
        assert "test_accuracy" in trainer.fit()


@pytest.mark.parametrize("fails", [False, True])
def test_run_without_a_signal_restores_the_handlers(fails, handlers, tmp_path):
    seen = []

    def look(_trainer: tk.Trainer) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        if fails:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck") if fails else nullcontext():
        train_with(small_config(tmp_path / "run", max_steps=2), in_hook("on_step_end", look))
    assert seen[0] not in handlers.values()
    assert {number: signal.getsignal(number) for number in handlers} == handlers


@pytest.mark.parametrize(
    ("writable", "error", "message"),
    [
        ("step-00000004", Preempted, r"at step 6; run `python mine\.py` to continue from step 4, the last"),
        ("none", tk.UserError, "stopped by SIGTERM at step 6, and no checkpoint could be written to"),
    ],
)
def test_stop_that_could_not_be_saved_names_the_last_checkpoint(writable, error, message, tmp_path, monkeypatch):
    write = checkpoint_files.save_file

    def full(*args: object) -> None:
        if writable not in str(args[1]):
            raise OSError(28, "No space left on device")
        write(*args)

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(error, match=message):
        train(small_config(tmp_path / "run", checkpoint=CheckpointOptions(every_steps=4)), Stop(6, "SIGTERM"))


def test_preemption_without_checkpointing_raises(tmp_path):
    with small_trainer(small_config(tmp_path / "run")) as trainer:
        del trainer.callbacks[-3]
        with pytest.raises(ValueError, match="needs Checkpointing in the list"):
            trainer.callbacks[-1].on_fit_start(trainer)
