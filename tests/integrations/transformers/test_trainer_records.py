"""Records, figures and logs of experts in transformers' Trainer, with and without expert parallelism."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.integrations.peft.models import base
from tests.integrations.transformers.trainers import STEPS, make, quiet_float64
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.integrations.transformers import monitor_routers

LAYERS = [f"moe/load/model.layers.{layer}.mlp.experts" for layer in (0, 1)]
MOVING = {"replan": ReplanOptions(planner="lpt", every=1, guarded=False)}


def train(folder: Path, way: str) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Return logs and weights of a trainer that is unmodified, monitored, or has sharded experts."""
    with quiet_float64():
        model = base("qwen3_moe")
        options = MOVING if way == "expert_trainer" else None
        trainer = make("Trainer", folder / way, model, options=options, report_to=["tensorboard"])
        if way == "monitor_routers":
            monitor_routers(trainer)
        trainer.train()
    return trainer.state.log_history, [parameter.detach() for parameter in model.parameters()]


def images(folder: Path) -> set[str]:
    """Return the images in TensorBoard's files."""
    (events,) = folder.glob("runs/*")
    reader = EventAccumulator(str(events)).Reload()
    assert {"train/moe/load_entropy", "train/loss"} <= {*reader.Tags()["scalars"]}
    return {*reader.Tags()["images"]}


def test_monitored_trainer_logs_loads_and_trains_the_same(tmp_path: Path) -> None:
    (logs, weights), (plain, expected) = (train(tmp_path, way) for way in ("monitor_routers", "plain"))
    assert all(map(torch.equal, weights, expected))
    for line, other in zip(logs[:-1], plain[:-1], strict=True):
        assert line["loss"] == other["loss"]
        assert line["moe/untrained_experts"] == 0
        assert not any(isinstance(value, list) for value in line.values()), "lists are in metrics.jsonl"
    lines = list(tk.read_metrics(tmp_path / "monitor_routers" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [0, *range(1, STEPS + 1)]
    assert all(sum(line[name]) == pytest.approx(1) for line in lines[1:] for name in LAYERS)
    assert (tmp_path / "monitor_routers" / "expert_load.png").exists()
    assert images(tmp_path / "monitor_routers") == {"train/expert_load"}


def test_expert_trainer_draws_the_figures_of_recipes(tmp_path: Path) -> None:
    run_distributed(train, 2, tmp_path, "expert_trainer")
    folder = tmp_path / "expert_trainer"
    names = {"expert_load", "rank_load", "expert_placement", "expert_moves"}
    assert {path.stem for path in folder.glob("*.png")} == names
    assert images(folder) == {f"train/{name}" for name in names}
    assert {*tk.save_expert_figures(tmp_path, folder / "metrics.jsonl")} == names
