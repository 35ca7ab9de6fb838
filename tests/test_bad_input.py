"""Bad input is refused with exit code 2 and one line that says what to do, on one process and on two."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from recipes.mnist_moe import PRESETS, main
from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT, run_distributed, run_recipe
from toolkit.errors import UserError
from toolkit.run import cli
from toolkit.run.config.flags import as_typed
from toolkit.run.launch import agent

# What is typed (after the preset), and what the line must say. What tyro and pydantic say is tried once each.
REFUSED_BEFORE_ANYTHING_STARTS = [
    ("--num-processes 2 --cpu --experst 4", "Did you mean --experts?"),
    ("--planner swap", "Did you mean --replan.planner?"),
    ("--zzz 1", "unknown flag --zzz"),
    ("something", "unknown preset 'something'"),
    ("--run-dir=", "--run-dir: has no value"),
    ("--experts four", "Error parsing --experts: invalid literal"),
    ("--lr nan", "--lr nan: input should be"),
    ("--gradient-accumulation-steps 3", "--batch-size 64: it must divide by"),
    ("--num-processes 3 --cpu", "it must divide by 3"),
    ("--max-experts 8 --spare-slots 1", "--spare-slots 1: dynamic experts"),
    ("--max-experts 8 --compile", "--compile: dynamic experts"),
    ("--max-experts 8 --dense-parallel fsdp2", "--dense-parallel fsdp2: dynamic experts"),
    ("--replan.planner swapp", "--replan.planner swapp: take one of contiguous, "),
]


@pytest.mark.parametrize(("typed", "line"), REFUSED_BEFORE_ANYTHING_STARTS)
def test_what_can_be_known_is_refused_before_anything_starts(
    typed: str, line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def start(*_: Any) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(agent, "start_processes", start)
    preset = ["debug"] if typed.startswith("-") else []
    monkeypatch.setattr(sys, "argv", ["mnist_moe.py", *preset, *typed.split()])
    with pytest.raises(SystemExit) as left:
        cli.run_recipe(start, PRESETS)
    out, err = capfd.readouterr()
    assert left.value.code == 2
    assert out == ""
    assert_one_line(err, line)


def assert_one_line(err: str, says: str) -> None:
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n"), err
    assert says in err


@pytest.mark.parametrize("typed", ["--experst 4", "--lr nan", "--num-processes 3 --cpu", "--replan.planner swapp"])
def test_bad_input_is_answered_without_loading_torch(typed: str):
    done = run_recipe("mnist_moe", "debug", *typed.split(), env={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert len(said) == 1
    assert "toolkit.errors" in imported
    assert not {"torch", "accelerate", "transformers", "datasets"} & set(imported)


# --- what only a run that has begun can know ---------------------------------------------------------------------


# Name: what is typed after the preset, with {folder} for one that `prepare` filled, and what the line must say.
REFUSED_AFTER_THE_START = {
    "data folder that is not there": ("--dataset mnist --data-dir {folder}/nowhere", "nowhere"),
    "data folder without the set": ("--dataset mnist --data-dir {folder}/empty", "/empty"),
    "data folder without the set, auto": ("--dataset auto --data-dir {folder}/empty", "/empty"),
    "corrupt parquet": ("--dataset mnist --data-dir {folder}/corrupt", "train-00000-of-00001.parquet"),
    "unknown set": ("--dataset cifar", "--dataset cifar"),
    "run folder below a file": ("--run-dir {folder}/file/run", "/file/run: Not a directory"),
    "run folder that is a file": ("--run-dir {folder}/file", "/file: File exists"),
    "run folder that cannot be written": ("--run-dir /proc/toolkit-run", "/proc/toolkit-run: "),
    "locked run folder": ("--run-dir {folder}/locked", "another job uses this folder"),
    "finished run": ("--run-dir {folder}/finished", "finished run"),
    "other numbers": ("--run-dir {folder}/stopped --lr 0.5", "--lr"),
    "run that must not be continued": ("--run-dir {folder}/stopped --resume no", "--resume no"),
    "resume from nothing": ("--run-dir {folder}/empty --resume", "--resume yes"),
    "resume without a checkpoint": ("--run-dir {folder}/bare --resume", "--resume yes"),
    "foreign checkpoint": ("--run-dir {folder}/foreign", "checkpoint"),
    "fp16 on a CPU": ("--mixed-precision fp16", "--mixed-precision fp16"),
    "ep_size beyond the world": ("--experts 6 --ep-size 3", "--ep-size 3"),
    "an exchange between the nodes of one": ("--exchange hierarchical", "--exchange hierarchical"),
}
COMMON = ["debug", "--tracker", "none", "--cpu", "--max-steps", "2"]


def prepare(folder: Path) -> None:
    """The files that the cases speak of, but for the runs."""
    (folder / "file").write_text("")
    for name in ("empty", "corrupt", "locked"):
        (folder / name).mkdir()
    for split in ("train", "test"):
        (folder / "corrupt" / f"{split}-00000-of-00001.parquet").write_bytes(b"PAR1 and then nothing of the kind")


def attempt(*flags: str) -> str | None:
    """What this rank is told when it runs the recipe; None when that went to the end."""
    config = cli.parse(PRESETS, [*COMMON, *flags])
    try:
        main(config)
    except UserError as error:
        return as_typed(error, config)
    return None


def refusals(folder: Path) -> dict[str, str | None]:
    """What this rank is told in each case. A collective."""
    import torch.distributed as dist

    for name in ("finished", "stopped", "bare"):
        assert attempt("--run-dir", str(folder / name)) is None
    assert attempt("--run-dir", str(folder / "foreign"), "--expert-hidden-size", "16") is None
    if not dist.is_initialized() or dist.get_rank() == 0:
        for name in ("stopped", "bare", "foreign"):
            (folder / name / "results.json").unlink()
        shutil.rmtree(folder / "bare" / "checkpoints")
        config = json.loads((folder / "foreign" / "config.json").read_text())
        (folder / "foreign" / "config.json").write_text(json.dumps(config | {"expert_hidden_size": 32}))
    told = {}
    for name, (typed, _) in REFUSED_AFTER_THE_START.items():
        if dist.is_initialized():
            dist.barrier()
        told[name] = attempt(*typed.format(folder=folder).split())
    return told


@pytest.fixture(scope="module")
def told_to_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("bad_input")
    prepare(folder)
    with FileLock(folder / "locked" / ".lock"):
        return run_distributed(refusals, 2, folder)


@pytest.mark.parametrize("name", REFUSED_AFTER_THE_START)
def test_what_only_a_run_can_know_is_refused_on_all_ranks_alike(name: str, told_to_ranks: list[dict[str, str]]):
    first = told_to_ranks[0][name]
    assert first is not None, "it ran"
    assert REFUSED_AFTER_THE_START[name][1] in first
    assert "\n" not in first
    assert [told[name] for told in told_to_ranks] == [first] * len(told_to_ranks)


@pytest.mark.parametrize("flags", [[], ["--num-processes", "2"]], ids=["1 process", "2 processes"])
@pytest.mark.parametrize("name", ["corrupt parquet", "locked run folder"])
def test_a_run_that_is_refused_leaves_with_code_2_and_one_line(name: str, flags: list[str], tmp_path: Path):
    prepare(tmp_path)
    typed, says = REFUSED_AFTER_THE_START[name]
    with FileLock(tmp_path / "locked" / ".lock"):
        words = [*COMMON, *flags, *typed.format(folder=tmp_path).split()]
        done = run_forked(str(ROOT / "recipes" / "mnist_moe.py"), *words, cwd=tmp_path)
    assert done.returncode == 2
    assert_one_line(done.stderr, says)
