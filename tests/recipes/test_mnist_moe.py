"""The presets of `recipes/mnist_moe.py`, each cut to seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from recipes.mnist_moe import Config, dynamic_debug, full, main
from toolkit.run.tracking.jsonl import read_metrics


def small(config: Config, folder: Path, **changes: object) -> Config:
    """On scikit-learn's digits, which are 22 steps an epoch."""
    settings = {"dim": 32, "expert_hidden_size": 16, "dataset": "digits", "cpu": True, "tracker": "none"} | changes
    return config.replace(run_dir=folder, **settings)


@pytest.mark.parametrize("seed", range(2))
def test_what_a_fresh_clone_trains_ends_balanced(seed: int, tmp_path: Path) -> None:
    """Of five seeds the busiest expert has 1.09 to 1.41 times the mean load, the least busy 0.77 to 0.93 times."""
    results = main(full().replace(seed=seed, dataset="digits", cpu=True, tracker="none", run_dir=tmp_path))
    [load_E] = results["expert_load"].values()
    assert len(load_E) == 8
    assert sum(load_E) == pytest.approx(1, abs=1e-3)
    assert 0.4 <= 8 * min(load_E) <= 8 * max(load_E) <= 1.5
    assert "expert_load_notice" not in results


def test_dynamic_splits_experts_and_keeps_those_that_the_loss_needs(tmp_path: Path) -> None:
    results = main(small(dynamic_debug(), tmp_path))
    events = [event for line in read_metrics(tmp_path / "lifecycle.jsonl") for event in line["events"]]
    assert dynamic_debug().lifecycle.min_experts <= results["active_experts"] <= dynamic_debug().max_experts
    assert results["min_expert_load"] * results["active_experts"] > 0.05
    assert results["lifecycle_grow"] >= 2
    assert results["lifecycle_merge"] + results["lifecycle_prune"] >= 1
    assert results["active_experts"] == 4 + sum(
        {"grow": 1, "merge": -1, "prune": -1}.get(event["kind"], 0) for event in events
    )
    tried = [event for event in events if "gain" in event["detail"]]
    assert {event["kind"] for event in tried} <= {"kept", "prune"}
    for event in tried:
        assert (event["kind"] == "kept") == (event["detail"]["gain"] >= dynamic_debug().lifecycle.trial_gain)
        assert event["detail"]["gain"] == pytest.approx(event["detail"]["loss_without"] / event["detail"]["loss"] - 1)
    assert "split off" in (tmp_path / "summary.txt").read_text()
    for name in ("training_metrics", "expert_activations", "expert_device_distribution", "knowledge_graph_epoch_001"):
        with Image.open(tmp_path / f"{name}.png") as image:
            assert min(image.size) > 300, name
    assert json.loads((tmp_path / "results.json").read_text())["lifecycle_kept"] == results["lifecycle_kept"]
