"""The table of `benchmarks/learning/mnist_accuracy.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.learning import mnist_accuracy
from benchmarks.learning.mnist_accuracy import Job, results, row


def test_a_row_has_the_worst_load_of_any_seed_over_the_mean():
    runs = [
        {"test_accuracy": 0.974, "min_expert_load": 0.1, "max_expert_load": 0.15},
        {"test_accuracy": 0.976, "min_expert_load": 0.05, "max_expert_load": 0.2},
    ]
    found = row("mixture", 1, runs)
    assert found["test accuracy %"] == 97.5
    assert found["each seed"] == [97.4, 97.6]
    assert found["busiest expert over mean"] == 1.6
    assert found["least expert over mean"] == 0.4
    assert row("dense", 1, runs)["busiest expert over mean"] is None


def test_a_run_that_was_made_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mnist_accuracy, "RUNS", tmp_path)
    (tmp_path / "dense-digits-2-7.json").write_text(json.dumps({"test_accuracy": 0.5}))
    assert results(Job("dense", 2, 7, "digits", None)) == {"test_accuracy": 0.5}
