"""The recipe with experts that move and have copies, and with dense parameters in pieces: the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_recipe

COMMON = ["debug", "--tracker", "none", "--cpu", "--balance", "none", "--num-processes", "2", "--no-guard"]
WAYS = {
    "swap": ["--planner", "swap", "--replan-every", "5"],
    "replicate": ["--planner", "replicate", "--replan-every", "4", "--spare-slots", "1"],
    "affinity": ["--planner", "affinity", "--replan-every", "5"],
    "node_aware": ["--planner", "node_aware", "--replan-every", "5"],
    "round-robin": ["--initial-placement", "round_robin", "--planner", "lpt", "--replan-every", "5"],
    "fsdp2": ["--dense-parallel", "fsdp2", "--planner", "lpt", "--replan-every", "5"],
}


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def losses(folder: Path) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    done = run_recipe("mnist_moe", *COMMON, "--run-dir", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_a_run_learns_the_same_wherever_its_experts_live(plain: Path, tmp_path: Path, way: str) -> None:
    whole = tmp_path / "whole"
    done = run_recipe("mnist_moe", *COMMON, *WAYS[way], "--run-dir", str(whole))
    assert done.returncode == 0, done.stderr
    assert results(whole)["migrated_experts"] > 0
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-5)
    assert results(whole)["test_accuracy"] == pytest.approx(results(plain)["test_accuracy"], abs=1e-3)
