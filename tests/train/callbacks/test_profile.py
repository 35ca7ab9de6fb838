"""`--profile` writes traces and does not change training."""

import gzip
import json
from pathlib import Path
from typing import Any

import torch

import toolkit as tk
from tests.support.symlinks import symlink_to_file
from tests.support.trainers import fit
from toolkit.run.tracking.jsonl import read_metrics

TABLE = tk.TensorTable(input=torch.linspace(-1, 1, 512 * 16).view(512, 16), label=torch.arange(512) % 3)


def train(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Return the metrics of eight steps without timings."""
    torch.manual_seed(0)
    fit(folder, tk.MLP(16, 3), TABLE, batch_size=64, log_every=4, **settings)
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]


def test_profile_writes_traces_and_does_not_change_training(tmp_path, capsys):
    folder = tmp_path / "with" / "profile"
    folder.mkdir(parents=True)
    (tmp_path / "with" / ".lock").touch()  # marks a run folder
    precious = symlink_to_file(folder / "trace-rank-00000.json.gz")
    assert train(tmp_path / "with", profile=True) == train(tmp_path / "without")
    assert precious.read_text() == "precious"
    assert "profile in " in capsys.readouterr().out
    with gzip.open(folder / "trace-rank-00000.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 5
    assert "aten::addmm" in names
    assert "aten::addmm" in (folder / "operations-rank-00000.txt").read_text()
    assert not (tmp_path / "without" / "profile").exists()


def test_profile_of_a_short_run_warns(tmp_path, capsys):
    train(tmp_path, profile=True, max_steps=1)
    assert "the run has too few steps" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()
