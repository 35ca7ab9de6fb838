"""The table of `benchmarks/learning/mnist_accuracy.py`."""

from __future__ import annotations

from benchmarks.learning.mnist_accuracy import row


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
