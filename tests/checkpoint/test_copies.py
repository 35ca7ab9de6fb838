"""--storage: machines without a shared folder, and runs that continue after their folder is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import planted, run_distributed
from tests.support.small_run import SmallConfig, Stop, small_config, small_trainer, train
from toolkit.errors import Preempted, UserError
from toolkit.experts.state import manifest
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.storage import Storage
from toolkit.train.callbacks import checkpointing


def train_on_machines(parent: Path) -> tuple[list[str], int]:
    """As one of two ranks on machines of their own: what each folder holds after a stop, and the steps of a storage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        # The first of two evaluations is the best one, and not of the newest checkpoint.
        patch.setattr(checkpointing, "is_share", lambda _: True)
        best = {"best": "eval/loss", "every_steps": 4, "keep": 1, "in_background": True}
        kept: Any = {"checkpoint": CheckpointOptions(**best)}
        undisturbed = train(small_config(parent / "shared by both", **kept), ep_size=2)
        mine = "ab"[dist.get_rank()]
        with pytest.raises(UserError, match=r"run_dir=.* is not the same on all machines. Give a shared folder"):
            train(small_config(parent / mine), ep_size=2)
        settings = {"storage": f"file://{parent}/bucket/run", **kept}
        with pytest.raises(Preempted):
            train(small_config(parent / mine, **settings), Stop(13, "SIGTERM"), ep_size=2)
        held = [path.name for path in sorted((parent / mine / "checkpoints" / "step-00000010").iterdir())]
        # Other machines, which have nothing.
        continued = train(small_config(parent / f"later-{mine}", **settings), ep_size=2)
    for name, value in undisturbed.weights.items():
        assert torch.equal(continued.weights[name], value), name
    assert continued.results == undisturbed.results
    if dist.get_rank() == 0:
        assert continued.metrics == undisturbed.metrics
    for place in (parent / f"later-{mine}", parent / "bucket" / "run"):
        assert sorted(path.name for path in (place / "checkpoints").iterdir()) == ["step-00000010", "step-00000020"]
    return held, min(continued.samples)


def test_machines_without_a_shared_folder_continue_bitwise_identical(tmp_path: Path):
    (held, first), (other_held, _) = run_distributed(train_on_machines, 2, tmp_path)
    assert first == 14
    assert "manifest.json" in held
    assert "manifest.json" in other_held
    assert not {name for name in held if name.startswith("experts-")} & {*other_held}
    copies = tmp_path / "bucket" / "run"
    assert manifest.find_damage(copies / "checkpoints" / "step-00000020") is None
    assert {"config.json", "metrics.jsonl"} <= {path.name for path in copies.iterdir()}


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    """The URI of a store in memory, without folders or renaming, as object stores are."""
    return f"memory://{request.node.name}/run"


def small(folder: Path, storage: str, **settings: Any) -> SmallConfig:
    return small_config(folder, storage=storage, checkpoint=CheckpointOptions(every_steps=4), **settings)


def finish(config: SmallConfig) -> None:
    with small_trainer(config) as trainer:
        trainer.run.finish(trainer.fit())


@pytest.mark.parametrize("lost", ["manifest.json", "model.safetensors"])
def test_interrupted_copy_is_not_used(lost: str, bucket: str, tmp_path: Path, monkeypatch, capsys):
    put = Storage.put

    def fail(self: Storage, file: Path, path: str) -> None:
        if path.endswith(f"step-00000008/{lost}"):
            raise OSError("the line was cut")
        put(self, file, path)

    monkeypatch.setattr(Storage, "put", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(small(tmp_path / "first", bucket), Stop(9, "exception"))
    assert "step-00000008 is not in memory://" in capsys.readouterr().out
    assert "manifest.json" not in Storage(bucket).names("checkpoints/step-00000008")
    train(small(tmp_path / "second", bucket))
    assert "continuing at step 4 " in capsys.readouterr().out


def test_damaged_checkpoint_is_completed_from_its_copy_and_old_copies_are_deleted(bucket: str, tmp_path: Path, capsys):
    with pytest.raises(RuntimeError, match="out of luck"):
        train(small(tmp_path / "run", bucket), Stop(14, "exception"))
    assert Storage(bucket).names("checkpoints", "directory") == ["step-00000008", "step-00000012"]
    path = tmp_path / "run" / "checkpoints" / "step-00000012"
    model = path / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    (path / "optimizer.safetensors").unlink()
    train(small(tmp_path / "run", bucket))
    assert "continuing at step 12 (step-00000012 verified)" in capsys.readouterr().out


def test_storage_that_does_not_answer_ends_a_start_and_not_a_run(bucket: str, tmp_path: Path, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put", fail)
        finish(small(tmp_path / "run", bucket))
    said = capsys.readouterr().out
    assert "step-00000020 is not in " in said
    assert "lacks the last files" in said
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", fail)
    with pytest.raises(UserError, match=r"memory://.*: no route\."):
        train(small(tmp_path / "other", bucket))


def test_download_does_not_follow_links(bucket: str, tmp_path: Path):
    (tmp_path / "own").write_text("own")
    Storage(bucket).put(tmp_path / "own", "summary.txt")
    precious = [planted(tmp_path / name) for name in ("summary.txt", ".summary.txt.partial")]
    Storage(bucket).get("summary.txt", tmp_path / "summary.txt")
    assert (tmp_path / "summary.txt").read_text() == "own"
    assert [path.read_text() for path in precious] == ["precious"] * 2


def test_run_in_a_storage_is_not_overwritten(bucket: str, tmp_path: Path):
    finish(small(tmp_path / "run", bucket))
    assert {"config.json", "metrics.jsonl", "results.json", "summary.txt"} <= {*Storage(bucket).names()}
    with pytest.raises(UserError, match=r"storage=.*: has a run, and resume='no' was given"):
        train(small(tmp_path / "other", bucket, resume="no"))
    with pytest.raises(UserError, match=r"run_dir=.*: has a finished run"):
        train(small(tmp_path / "another", bucket))
    with pytest.raises(UserError, match="resume='yes': no run in memory://nothing"):
        train(small(tmp_path / "third", "memory://nothing", resume="yes"))
    with pytest.raises(UserError, match="resume_from=4: leave storage out"):
        small(tmp_path / "fourth", bucket, resume_from=4)


def test_run_killed_after_a_copy_keeps_its_newer_files(bucket: str, tmp_path: Path, monkeypatch):
    config, folder = small(tmp_path / "run", bucket), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put_finished", lambda *_: None)
        finish(config)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "run/note": "written after the copy"}\n')
    written = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    Storage(bucket).get_run(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == written
    copy = tmp_path / "copy"
    copy.mkdir()
    Storage(bucket).get("metrics.jsonl", copy / "metrics.jsonl")
    assert (copy / "metrics.jsonl").read_bytes() != written["metrics.jsonl"], "the copy is older"
    (folder / "config.json").write_text("{")
    (folder / "metrics.jsonl").unlink()
    Storage(bucket).get_run(folder)
    assert (folder / "config.json").read_bytes() == written["config.json"]
    assert (folder / "metrics.jsonl").read_bytes() == (copy / "metrics.jsonl").read_bytes()
    (folder / "summary.txt").write_text("of an older step")
    (folder / "checkpoints" / "step-00000020").rename(tmp_path / "gone")
    Storage(bucket).put(folder / "summary.txt", "metrics.jsonl")
    Storage(bucket).get_run(folder)
    assert (folder / "metrics.jsonl").read_text() == "of an older step"
