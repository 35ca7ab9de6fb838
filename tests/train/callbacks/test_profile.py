"""`--profile` writes traces and changes nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toolkit as tk
from tests.support.helpers import planted
from tests.support.trainers import standard_trainer
from toolkit.data.table import TensorTable
from toolkit.run.config.experts import MoERunConfig
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks.profile import Profile

DIM, EXPERTS, CLASSES = 16, 4, 3


def config(folder: Path, **settings: Any) -> MoERunConfig:
    some = {"batch_size": 512, "max_steps": 17, "log_every": 4, "experts": EXPERTS, "balance_weight": 0.0} | settings
    return MoERunConfig(run_dir=folder, tracker="none", cpu=True, lr=1e-3, **some)


def table() -> TensorTable:
    draws = torch.Generator().manual_seed(0)
    return TensorTable(input=torch.randn(4096, DIM, generator=draws), label=torch.arange(4096) % CLASSES)


def train(config: MoERunConfig) -> dict[str, Any]:
    with tk.start_run("profiled", config) as run:
        moe = tk.moe_from_config(config, DIM, groups=tk.experts.make_expert_groups(run.world_size))
        model = nn.Sequential(nn.Linear(DIM, DIM), moe, nn.Linear(DIM, CLASSES))
        trainer = standard_trainer(run, tk.Classification(), model, train=table(), test=table())
        assert any(isinstance(callback, Profile) for callback in trainer.callbacks) == config.profile
        return run.finish(trainer.fit())


def learned(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]


def test_a_profile_is_written_and_nothing_else_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "with" / "profile").mkdir(parents=True)
    (tmp_path / "with" / ".lock").touch()  # else it is not a folder of a run
    precious = planted(tmp_path / "with" / "profile" / "trace-rank-00000.json.gz")
    for name, profile in (("with", True), ("without", False)):
        train(config(tmp_path / name, profile=profile))
    assert precious.read_text() == "precious"
    assert learned(tmp_path / "with") == learned(tmp_path / "without")
    assert "profile in " in capsys.readouterr().out
    with gzip.open(tmp_path / "with" / "profile" / "trace-rank-00000.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 5
    assert "aten::addmm" in names
    assert "aten::addmm" in (tmp_path / "with" / "profile" / "operations-rank-00000.txt").read_text()
    assert not (tmp_path / "without" / "profile").exists()


def test_a_run_that_is_too_short_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(config(tmp_path, profile=True, max_steps=1))
    assert "the run has too few steps" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()
