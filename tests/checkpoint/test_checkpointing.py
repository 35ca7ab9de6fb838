"""When runs save checkpoints, in the background or not, which they keep, and the one they resume from."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.checkpoint.test_checkpoint import OneRank, flip, save, snapshot, state_at, trained
from tests.support.small_run import SmallConfig, Stop, small_config, small_trainer, train
from tests.support.trainers import in_hook
from toolkit.checkpoint import checkpoint, without_model
from toolkit.checkpoint.background import BackgroundSave
from toolkit.checkpoint.finding import find_checkpoint
from toolkit.checkpoint.retention import best_or_newest
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.state import checkpoint_files, manifest
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.train.callbacks.evaluation import Evaluation


def test_run_keeps_the_newest_checkpoints_and_resumes_from_a_verified_one(tmp_path, capsys):
    config = small_config(tmp_path / "run", checkpoint=CheckpointOptions(every_steps=4, keep=3))
    saved = []

    def on_save(trainer, folder):
        assert manifest.find_damage(folder) is None
        saved.append((trainer.state.step, folder.name))

    with small_trainer(config, callbacks=[in_hook("on_save", on_save)]) as trainer:
        trainer.fit()
        assert json.loads(json.dumps(trainer.state_dict())) == trainer.state_dict()
    names = [f"step-{step:08d}" for step in (4, 8, 12, 16, 20)]
    assert saved == [(int(name[5:]), name) for name in names]
    folder = config.run_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == names[2:]
    flip(folder / "step-00000020" / "model.safetensors", 1)
    capsys.readouterr()
    with small_trainer(config) as trainer:
        trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    assert "warning: checkpoint step-00000020 is passed over: model.safetensors does not match its SHA-256." in lines
    assert "continuing at step 16 (step-00000016 verified)" in lines
    assert manifest.find_damage(folder / "step-00000020") is None


class Evaluated(Evaluation):
    """Reports the given values of a metric in turn after every second step."""

    on_fit_start = on_step_start = on_fit_end = lambda *_: None
    state_key, name = "validation", "validation"

    def __init__(self, values: list[float], metric: str = "accuracy"):
        self.values, self.metric = values, f"validation/{metric}"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def on_step_end(self, trainer):
        if trainer.state.step % 2 == 0 and self.values:
            trainer.call_hooks("on_evaluate_end", "validation", {self.metric: self.values.pop(0)})


def test_best_checkpoint_is_kept_with_the_newest_and_ends_the_run(tmp_path):
    options = CheckpointOptions(every_steps=5, keep=1, best="validation/accuracy")
    config = small_config(tmp_path / "run", checkpoint=options)
    folder = config.run_dir / "checkpoints"
    best: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []

    def run(accuracies: list[float], until: int, config: SmallConfig = config) -> list[str]:
        with small_trainer(config, callbacks=[Evaluated(accuracies)]) as trainer:
            trainer.max_steps = until
            trainer.fit()
            best.append(trainer.results.get("best_checkpoint"))
            results.append(trainer.results)
            kept = folder / f"step-{best[-1]['step'] if best[-1] else until:08d}"
            without_model.export(kept, tmp_path / f"{len(best)}.safetensors")
            weights = load_file(tmp_path / f"{len(best)}.safetensors")
            assert all(torch.equal(value, weights[name]) for name, value in trainer.raw_model.state_dict().items())
        return sorted(path.name for path in folder.iterdir())

    assert run([0.5, 0.7, torch.nan, 0.6], 10) == ["step-00000004", "step-00000010"]
    assert best[-1] == {"metric": "validation/accuracy", "step": 4, "evaluated": {"validation/accuracy": 0.7}}
    assert results[-1]["validation_accuracy"] == 0.7
    assert best_or_newest(folder).name == "step-00000004"
    assert run([0.7, 0.1], 16) == ["step-00000004", "step-00000016"]
    shutil.rmtree(folder / "step-00000004")
    with pytest.raises(tk.UserError, match="the best checkpoint, of step 4, is missing"):
        best_or_newest(folder)
    assert run([0.6], 20) == ["step-00000018", "step-00000020"]
    run([], 20, config.replace(checkpoint=CheckpointOptions(every_steps=5, keep=2)))
    assert best[-1] is None
    assert find_checkpoint(folder, OneRank()).name == "step-00000020"
    flip(folder / "step-00000020" / "state.json", 0)
    assert best_or_newest(folder).name == "step-00000018"


def test_best_of_an_unknown_evaluation_raises(tmp_path):
    config = small_config(tmp_path, checkpoint=CheckpointOptions(best="old/loss"))
    with (
        small_trainer(config, callbacks=[Evaluated([0.5])]) as trainer,
        pytest.raises(tk.UserError, match=r"checkpoint.best='old/loss': name one such as eval/loss, validation/loss"),
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("metric", "mode", "step"), [("recall", "max", 8), ("bleu", "min", 2), ("loss", None, 2), ("accuracy", None, 8)]
)
def test_best_checkpoint_has_the_best_value_of_its_metric(metric, mode, step, tmp_path):
    options = CheckpointOptions(best=f"validation/{metric}", best_mode=mode)
    evaluated = Evaluated([0.2, 0.3, 0.4, 0.9], metric)
    with small_trainer(small_config(tmp_path, checkpoint=options), callbacks=[evaluated]) as trainer:
        trainer.fit()
        assert trainer.results["best_checkpoint"]["step"] == step


def test_best_of_a_metric_without_direction_raises():
    with pytest.raises(tk.UserError, match=r"validation/recall.*checkpoint\.best_mode to max or min"):
        CheckpointOptions(best="validation/recall")


def test_best_names_an_evaluation_and_its_metric(tmp_path):
    assert CheckpointOptions(best="test/loss").best == "eval/loss"
    for best, validates in (("validation/loss", True), ("eval/loss", False), (None, False)):
        assert small_config(tmp_path, checkpoint=CheckpointOptions(best=best)).validates == validates


def change_during_a_save(folder: Path, world: int) -> None:
    """Change everything that is saved before the first file is written, and save again into the same buffers."""
    run, background, may_write = OneRank(), BackgroundSave(), threading.Event()
    write = checkpoint_files.save_file

    def delayed(*args: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert may_write.wait(60)
        write(*args)

    for step in (3, 5):
        model, optimizer = trained(make_expert_groups(world), steps=step)
        expected = save(folder / "at_once", (model, optimizer), step, run=run)
        may_write.clear()
        checkpoint_files.save_file = delayed
        state = state_at(step)
        parts = {"model": model, "optimizer": optimizer, "state": state, "keep": 2, "run": run}
        background.start(checkpoint.begin_checkpoint(folder / "background", **parts, to_cpu=background.buffers))
        with torch.no_grad():
            for parameter in model.parameters():
                for value in (parameter, *optimizer.state[parameter].values()):
                    value += 1
        state["callbacks"]["Some"] = {}
        may_write.set()
        saved = background.wait()
        checkpoint_files.save_file = write
        assert snapshot(saved) == snapshot(expected)
    assert run.lines == []


@pytest.mark.parametrize("world", [1, 2])
def test_background_save_writes_the_values_at_its_start(tmp_path, world):
    run_distributed(change_during_a_save, world, tmp_path, world)


def in_background(folder: Path, **settings: Any) -> Any:
    return small_config(folder, checkpoint=CheckpointOptions(every_steps=4, in_background=True), **settings)


def test_exception_waits_for_the_checkpoint_in_progress(tmp_path):
    with pytest.raises(RuntimeError, match="out of luck"):
        train(in_background(tmp_path / "run"), Stop(9, "exception"))
    assert manifest.find_damage(tmp_path / "run" / "checkpoints" / "step-00000008") is None


def test_run_without_its_last_checkpoint_is_not_finished(tmp_path, monkeypatch):
    write = checkpoint_files.save_file

    def full(*args: Any) -> None:
        if "step-00000020" in str(args[1]):
            raise OSError(28, "No space left on device")
        write(*args)

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(tk.UserError, match=r"the last checkpoint, of step 20, could not be written to .*\. Make room"):
        train(in_background(tmp_path / "run"))
    assert not (tmp_path / "run" / "results.json").exists()
    monkeypatch.undo()
    train(in_background(tmp_path / "run"))
    assert manifest.find_damage(tmp_path / "run" / "checkpoints" / "step-00000020") is None


def test_error_in_the_thread_ends_the_run(tmp_path, monkeypatch):
    def bug(*_: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(checkpoint_files, "save_file", bug)
    with pytest.raises(RuntimeError, match="bug"):
        train(in_background(tmp_path / "run"))
