"""Checkpoints written in the background equal synchronous checkpoints."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.checkpoint.test_checkpoint import OneRank, save, state_at, trained
from tests.support.small_run import Stop, small_config, train
from toolkit.checkpoint import checkpoint
from toolkit.checkpoint.background import BackgroundSave
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.state import checkpoint_files, manifest
from toolkit.run.config.callback_options import CheckpointOptions


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
        assert bytes_of(saved) == bytes_of(expected)
    assert run.lines == []


@pytest.mark.parametrize("world", [1, 2])
def test_background_save_writes_the_values_at_its_start(tmp_path, world):
    run_distributed(change_during_a_save, world, tmp_path, world)


def in_background(folder: Path, **settings: Any) -> Any:
    return small_config(folder, checkpoint=CheckpointOptions(every_steps=4, in_background=True), **settings)


def train_both_ways(folder: Path) -> None:
    at_once = train(small_config(folder / "at_once", checkpoint=CheckpointOptions(every_steps=4)), ep_size=2)
    outcome = train(in_background(folder / "background"), ep_size=2)
    outcome.assert_equals(at_once)
    for name in ("step-00000016", "step-00000020"):
        files = [bytes_of(folder / how / "checkpoints" / name) for how in ("at_once", "background")]
        assert files[0].keys() == files[1].keys()
        assert all(files[0][file] == files[1][file] for file in files[0] if file.endswith(".safetensors"))


def test_background_saves_change_neither_run_nor_checkpoints(tmp_path):
    run_distributed(train_both_ways, 2, tmp_path)


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
