"""Metrics lines, results and plots of a run whose experts migrate."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.precision import IN_FLOAT64, in_float64
from benchmarks.support.processes import run_distributed
from recipes import mnist_moe
from toolkit.run import cli

COMMON = "debug --epochs 1 --dataset digits --tracker none --cpu --balance none --log-every 2"
FLAGS = {
    "default": "",
    "moves": "--initial-placement round_robin --spare-slots 1 --dense-parallel fsdp2 --replan.planner replicate "
    "--replan.every 5 --replan.no-guarded",
}


def train(folder: Path) -> None:
    for name, flags in FLAGS.items():
        arguments = [*COMMON.split(), *flags.split(), "--run-dir", str(folder / name)]
        with in_float64():
            mnist_moe.main(cli.parse(mnist_moe.PRESETS, arguments))


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return metrics lines and results of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((folder / "results.json").read_text())


def test_run_with_moves_records_placements_and_equals_run_without(tmp_path: Path):
    run_distributed(train, 2, tmp_path)
    (fixed, expected), (lines, results) = (read(tmp_path / name) for name in FLAGS)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses == pytest.approx([line["train/loss"] for line in fixed if "train/loss" in line], rel=IN_FLOAT64)
    assert results["test_accuracy"] == expected["test_accuracy"]
    assert results["migrated_experts"] > 0
    placements = [line["moe/placement/block"] for line in lines if "moe/placement/block" in line]
    assert lines[0]["moe/placement/block"] == placements[0]
    assert 1 < len(placements) < len(lines)
    assert all(before != after for before, after in pairwise(placements)), "recorded without a move"
    assert placements[-1] == results["expert_placement"]["block"]
    assert max(map(len, placements[-1])) == 3, "no replica in a spare slot"
    assert results["placement_before_moves"]["block"] == placements[0] == [[0, 2], [1, 3]]
    assert (tmp_path / "moves" / "expert_moves.png").exists()
    assert not (tmp_path / "default" / "expert_moves.png").exists()
    assert not any(name.startswith("moe/placement") for line in fixed for name in line)
