"""`--storage`: machines without a shared folder, and runs that resume without their folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.processes import run_distributed
from tests.support.small_run import SmallConfig, Stop, small_config, small_trainer, train
from tests.support.special_files import symlink_to_file
from toolkit.errors import Preempted, UserError
from toolkit.experts.state import manifest
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.storage import Storage


def train_on_machines(parent: Path) -> tuple[list[str], int]:
    """Train, stop and resume on two machines without a shared folder; return the files of this one and its first step.

    The best checkpoint is not the newest.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        best = {"best": "eval/loss", "best_mode": "max", "every_steps": 4, "keep": 1, "in_background": True}
        settings: Any = {"checkpoint": CheckpointOptions(**best)}
        uninterrupted = train(small_config(parent / "shared by both", **settings), ep_size=2)
        machine = "ab"[dist.get_rank()]
        with pytest.raises(UserError, match=r"run_dir=.* is not the same on all machines. Give a shared folder"):
            train(small_config(parent / machine), ep_size=2)
        settings["storage"] = f"file://{parent}/bucket/run"
        with pytest.raises(Preempted):
            train(small_config(parent / machine, **settings), Stop(13, "SIGTERM"), ep_size=2)
        files = [path.name for path in (parent / machine / "checkpoints" / "step-00000010").iterdir()]
        resumed = train(small_config(parent / f"later-{machine}", **settings), ep_size=2)
    for name, value in uninterrupted.weights.items():
        assert torch.equal(resumed.weights[name], value), name
    assert resumed.results == uninterrupted.results
    if dist.get_rank() == 0:
        assert resumed.metrics == uninterrupted.metrics
    for place in (parent / f"later-{machine}", parent / "bucket" / "run"):
        assert sorted(path.name for path in (place / "checkpoints").iterdir()) == ["step-00000010", "step-00000020"]
    return files, min(resumed.samples)


def test_machines_without_a_shared_folder_resume_bitwise_identical(tmp_path):
    (files, first), (other_files, _) = run_distributed(train_on_machines, 2, tmp_path)
    assert first == 14
    assert "manifest.json" in files
    assert "manifest.json" in other_files
    assert not {name for name in files if name.startswith("experts-")} & {*other_files}
    copies = tmp_path / "bucket" / "run"
    assert manifest.find_damage(copies / "checkpoints" / "step-00000020") is None
    assert {"config.json", "metrics.jsonl"} <= {path.name for path in copies.iterdir()}


@pytest.fixture
def bucket(request):
    """URI of an object store in memory."""
    return f"memory://{request.node.name}/run"


def small(folder: Path, storage: str, **settings: Any) -> SmallConfig:
    return small_config(folder, storage=storage, checkpoint=CheckpointOptions(every_steps=4), **settings)


def finish(config: SmallConfig) -> None:
    with small_trainer(config) as trainer:
        trainer.run.finish(trainer.fit())


def fail_after(config: SmallConfig, step: int) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        train(config, Stop(step, "exception"))


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("lost", ["manifest.json", "model.safetensors"])
def test_interrupted_copy_is_not_used(lost, bucket, tmp_path, monkeypatch, capsys):
    put = Storage.put

    def fail(self: Storage, file: Path, path: str) -> None:
        if path.endswith(f"step-00000008/{lost}"):
            raise OSError("connection lost")
        put(self, file, path)

    monkeypatch.setattr(Storage, "put", fail)
    fail_after(small(tmp_path / "first", bucket), 9)
    assert "step-00000008 is not in memory://" in capsys.readouterr().out
    assert "manifest.json" not in Storage(bucket).names("checkpoints/step-00000008")
    train(small(tmp_path / "second", bucket))
    assert "continuing at step 4 " in capsys.readouterr().out


def test_damaged_checkpoint_is_completed_from_its_copy_and_old_copies_are_deleted(bucket, tmp_path, capsys):
    fail_after(small(tmp_path / "run", bucket), 14)
    assert Storage(bucket).names("checkpoints", "directory") == ["step-00000008", "step-00000012"]
    path = tmp_path / "run" / "checkpoints" / "step-00000012"
    model = path / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    (path / "optimizer.safetensors").unlink()
    train(small(tmp_path / "run", bucket))
    assert "continuing at step 12 (step-00000012 verified)" in capsys.readouterr().out


def test_unreachable_storage_raises_at_the_start_and_warns_at_the_end(bucket, tmp_path, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put", fail)
        finish(small(tmp_path / "run", bucket))
    out = capsys.readouterr().out
    assert "step-00000020 is not in " in out
    assert "lacks the last files" in out
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", fail)
    with pytest.raises(UserError, match=r"memory://.*: no route\."):
        train(small(tmp_path / "other", bucket))


def test_download_does_not_follow_links(bucket, tmp_path):
    (tmp_path / "own").write_text("own")
    for name in ("summary.txt", "of_a_killed_upload.partial"):
        Storage(bucket).put(tmp_path / "own", name)
    assert Storage(bucket).names() == ["summary.txt"]
    precious = [symlink_to_file(tmp_path / name) for name in ("summary.txt", ".summary.txt.partial")]
    Storage(bucket).get("summary.txt", tmp_path / "summary.txt")
    assert [path.read_text() for path in (tmp_path / "summary.txt", *precious)] == ["own", "precious", "precious"]


def test_run_in_a_storage_is_not_overwritten(bucket, tmp_path):
    finish(small(tmp_path / "run", bucket))
    assert {"config.json", "metrics.jsonl", "results.json", "summary.txt"} <= {*Storage(bucket).names()}
    for name, storage, settings, message in [
        ("overwrite", bucket, {"resume": "no"}, r"storage=.*: has a run, and resume='no' was given"),
        ("finished", bucket, {}, r"run_dir=.*: has a finished run"),
        ("missing", "memory://nothing", {"resume": "yes"}, "resume='yes': no run in memory://nothing"),
        ("rewind", bucket, {"resume_from": 4}, "resume_from=4: leave storage out"),
        ("unknown", "nowhere://bucket", {}, "Protocol not known: nowhere"),
    ]:
        with pytest.raises((UserError, OSError), match=message):
            train(small(tmp_path / name, storage, **settings))


def test_run_killed_after_a_copy_keeps_its_newer_files(bucket, tmp_path, monkeypatch):
    storage, folder, copy = Storage(bucket), tmp_path / "run", tmp_path / "metrics.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put_finished", lambda *_: None)
        finish(small(folder, bucket))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "run/note": "written after the copy"}\n')
    written = files_in(folder)
    storage.get_run(folder)
    assert files_in(folder) == written
    storage.get("metrics.jsonl", copy)
    assert copy.read_bytes() != written["metrics.jsonl"], "the copy is older"
    (folder / "config.json").write_text("{")
    (folder / "metrics.jsonl").unlink()
    storage.get_run(folder)
    assert (folder / "config.json").read_bytes() == written["config.json"]
    assert (folder / "metrics.jsonl").read_bytes() == copy.read_bytes()
    (folder / "summary.txt").write_text("of an older step")
    (folder / "checkpoints" / "step-00000020").rename(tmp_path / "gone")
    storage.put(folder / "summary.txt", "metrics.jsonl")
    storage.get_run(folder)
    assert (folder / "metrics.jsonl").read_text() == "of an older step"
