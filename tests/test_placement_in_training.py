"""The recipe with experts that move and have copies, and with dense parameters in pieces: the same numbers."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.support.precision import IN_FLOAT64, in_float64
from benchmarks.support.processes import run_distributed
from recipes import mnist_moe
from toolkit.run import cli

COMMON = ["debug", "--epochs", "1", "--dataset", "digits", "--tracker", "none", "--cpu", "--balance", "none"]
COMMON += ["--log-every", "2"]  # the first line is before the first plan
WAYS = {
    "plain": [],
    "swap": ["--replan.planner", "swap", "--replan.every", "5"],
    "round-robin": ["--initial-placement", "round_robin", "--replan.planner", "swap", "--replan.every", "5"],
    "by node": [
        "--exchange",
        "hierarchical",
        "--replan.planner",
        "replicate",
        "--replan.every",
        "4",
        "--spare-slots",
        "1",
    ],
    "fsdp2": ["--dense-parallel", "fsdp2", "--replan.planner", "lpt", "--replan.every", "5"],
}


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def losses(folder: Path) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def train(folder: Path) -> None:
    for way, flags in WAYS.items():
        if "--replan.planner" in flags:
            flags = [*flags, "--replan.no-guarded"]
        # Each process is on a node of its own.
        with in_float64(), mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
            mnist_moe.main(cli.parse(mnist_moe.PRESETS, [*COMMON, *flags, "--run-dir", str(folder / way)]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two processes for each way, by its name."""
    folder = tmp_path_factory.mktemp("placement")
    run_distributed(train, 2, folder)
    return folder


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
def test_a_run_learns_the_same_wherever_its_experts_live(runs: Path, way: str) -> None:
    found, plain = runs / way, runs / "plain"
    assert results(found)["migrated_experts"] > 0
    assert losses(found) == pytest.approx(losses(plain), rel=IN_FLOAT64)
    assert results(found)["test_accuracy"] == results(plain)["test_accuracy"]


def test_placements_are_on_the_lines_of_metrics_where_they_are_others(runs: Path) -> None:
    lines = [json.loads(line) for line in (runs / "swap" / "metrics.jsonl").read_text().splitlines()]
    placements = [line["moe/placement/block"] for line in lines if "moe/placement/block" in line]
    assert lines[0]["moe/placement/block"] == placements[0]
    assert 1 < len(placements) < len(lines)
    assert all(before != after for before, after in pairwise(placements))
    assert placements[-1] == results(runs / "swap")["expert_placement"]["block"]
    assert results(runs / "swap")["placement_before_moves"]["block"] == placements[0] == [[0, 1], [2, 3]]
    assert (runs / "swap" / "expert_moves.png").exists()
    assert not (runs / "plain" / "expert_moves.png").exists()
    assert not any("moe/placement" in name for name in (runs / "plain" / "metrics.jsonl").read_text().split('"'))
