"""What a run prints before its first step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import toolkit as tk
from recipes import mnist_moe
from tests.support.helpers import ROOT, run_distributed
from tests.support.trainers import standard_trainer
from toolkit.train.start import count_parameters, describe_start, warnings_of


def test_a_run_says_where_on_what_and_how_long_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = mnist_moe.debug().replace(run_dir=tmp_path, tracker="none", cpu=True, max_steps=2)
    mnist_moe.main(config)
    out = capsys.readouterr().out
    assert f"run folder {tmp_path}\n" in out
    assert "device      cpu, 1 process, float32\n" in out
    assert "data        digits, 1,442 training samples\n" in out
    # Stem 25,120, head 330, router 128, and four experts of 2 * 32 * 32 weights, two of which a token is sent to.
    assert "parameters  33,770, of which a token uses 29,674\n" in out
    assert "steps       2 of 64 samples, 0.08696 epoch(s)\n" in out


@pytest.mark.parametrize("settings", [{"warmup_steps": 20}, {"warmup_epochs": 50}])
def test_warnings_of_a_run_of_warmup_only(tmp_path: Path, settings: dict[str, Any]):
    for given in (settings, {}):
        schedule = tk.ScheduleOptions(**given)
        folder = tmp_path / str(len(given))
        with tk.start_run("mine", tk.RunConfig(run_dir=folder, tracker="none", cpu=True, schedule=schedule)) as run:
            warnings = warnings_of(run, nn.Linear(1, 1), tk.Splits([], []), 10, max_steps=20)
        assert any("all 20 steps are warm-up" in warning for warning in warnings) == bool(given)


def counts(ep_size: int) -> tuple[int, int | None]:
    groups = tk.experts.make_expert_groups(ep_size)
    moe = tk.experts.make_moe(8, 16, 4, 2, groups=groups, spare_slots=1 if ep_size > 1 else 0)
    return count_parameters(nn.Sequential(nn.Linear(4, 8), moe), 2)


def test_every_expert_counts_once_however_many_ranks_and_slots_there_are():
    whole = counts(1)
    each = (whole[0] - whole[1]) // 2
    assert each == sum(p[:1].numel() for p in tk.experts.make_moe(8, 16, 4, 2).experts.parameters())
    assert run_distributed(counts, 2, 2) == [whole, whole]


def test_a_model_without_experts_has_no_second_number():
    assert count_parameters(nn.Linear(4, 8), 1) == (40, None)


@pytest.mark.parametrize(
    ("gpus", "asked", "says"),
    [
        (4, None, "cuda (4 x NVIDIA L4), 1 process, float32 (one of 4 GPUs: --num-processes 4 uses all)"),
        (4, 1, "cuda (4 x NVIDIA L4), 1 process, float32"),
        (1, None, "cuda (1 x NVIDIA L4), 1 process, float32"),
    ],
)
def test_one_of_several_gpus_is_named_unless_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, asked: int | None, says: str
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    with tk.start_run("mine", tk.RunConfig(run_dir=tmp_path, tracker="none", cpu=True, num_processes=asked)) as run:
        run.device = torch.device("cuda")
        endless: Any = SimpleNamespace(endless=True, steps_per_epoch=1)
        assert describe_start(run, nn.Linear(4, 8), endless, 1)[0] == ("device", says)


def test_an_installation_says_how_long_it_takes_and_how_to_activate_it(tmp_path: Path):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "VENV")}
    done = subprocess.run(
        ["make", "-C", str(ROOT), "install", f"VENV={tmp_path / 'venv'}"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "a few minutes" in done.stdout
    assert f"source {tmp_path}/venv/bin/activate" in done.stdout


def normed(folder: Path, sync_bn: bool) -> str:
    config = tk.RunConfig(run_dir=folder, tracker="none", cpu=True, batch_size=4, epochs=1, sync_bn=sync_bn)
    table = tk.TensorTable(input=torch.randn(8, 4), label=torch.arange(8) % 2)
    said: list[str] = []
    with tk.start_run("mine", config) as run:
        run.print = said.append
        try:
            standard_trainer(
                run, tk.Classification(), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), train=table, test=table
            )
        except ValueError as error:  # of torch, on a CPU
            return str(error)
    return "\n".join(said)


def test_batch_norm_on_several_processes_is_said_and_not_synchronised_on_a_cpu(tmp_path: Path):
    for said in run_distributed(normed, 2, tmp_path / "each", False):
        assert "batch norm is over each process's part of the batch, unlike in one process: --sync-bn has it" in said
    assert "batch norm" not in run_distributed(normed, 1, tmp_path / "one", False)[0]


def test_trainer_with_sync_bn_converts_batch_norm(tmp_path: Path):
    for said in run_distributed(normed, 2, tmp_path, True):
        assert said == "SyncBatchNorm layers only work with GPU modules"


def test_editors_and_type_checkers_find_the_package_that_make_installs(tmp_path: Path):
    """They follow a path in a .pth file, and no finder, which is what setuptools writes by itself."""
    mode = re.search(r"editable_mode=(\w+)", (ROOT / "Makefile").read_text())
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "toolkit", source / "toolkit", ignore=shutil.ignore_patterns("__pycache__"))
    options = f"{str(tmp_path)!r}, {{'editable_mode': {mode and mode[1]!r}}}"
    code = f"import setuptools.build_meta as build; build.build_editable({options})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (path,) = [name for name in files.namelist() if name.endswith(".pth")]
        assert files.read(path).decode().strip() == str(source)
