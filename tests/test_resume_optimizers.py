"""Runs with optimizers and schedulers that keep settings in parameter groups resume exactly at any world size."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from benchmarks.support.precision import in_float64, relative_difference
from benchmarks.support.processes import run_distributed
from tests.support.optimizers import GrowingRates, ScheduleFreeSGD
from tests.test_elastic import STEPS, Layout, Trace, stop_at, trainer_of, weights_of
from toolkit import experts
from toolkit.errors import UserError
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.optim import constant


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices and other parameters with separate learning rates."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": matrices, "lr": 3e-3}, {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 1e-3}]


def one_cycle(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(two_groups(model))
    return optimizer, lr_scheduler.OneCycleLR(optimizer, [3e-2, 1e-2], total_steps=STEPS + 1)


def cyclic(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(two_groups(model), momentum=0.9)
    return optimizer, lr_scheduler.CyclicLR(optimizer, 1e-2, 1e-1, step_size_up=3)


def tensor_rates(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2))
    return optimizer, lr_scheduler.ExponentialLR(optimizer, 0.7)


OPTIMIZATIONS: dict[str, Any] = {
    "OneCycleLR": one_cycle,
    "CyclicLR": cyclic,
    "tensor rates": tensor_rates,
    "schedule-free": lambda model: (ScheduleFreeSGD(model.parameters(), lr=0.5), constant()),
    "Prodigy-like": lambda model: (GrowingRates(model.parameters(), lr=1e-2), constant()),
    "Adafactor": lambda model: (torch.optim.Adafactor(model.parameters(), lr=1e-2), constant()),
    "NAdam": lambda model: (torch.optim.NAdam(model.parameters(), lr=1e-2), constant()),
    "ASGD": lambda model: (torch.optim.ASGD(model.parameters(), lr=1e-1, t0=2), constant()),
}
LAYOUTS: list[Layout] = [(2, 2, "replicas"), (1, 1, "contiguous"), (4, 2, "uneven")]
"""Layouts of resumed runs; all begin in the first."""
STOPS = {kind: 1 + number * 3 % (STEPS - 1) for number, kind in enumerate(OPTIMIZATIONS)}
"""Step of the preemption."""


def train(folder: Path, kind: str, layout: Layout, until: int = STEPS) -> tuple[list[float], dict[str, Tensor], int]:
    trace = Trace()
    if kind == "Adafactor":  # its factors combine all experts, so it supports EP size 1 only
        layout = (layout[0], 1, "contiguous")
    callbacks = [trace, stop_at(until), Checkpointing()]
    make = OPTIMIZATIONS[kind]
    with in_float64(), trainer_of(folder / kind, layout, "loss", callbacks, log_every=1, optimization=make) as trainer:
        trainer.fit()
        return trace.losses, weights_of(trainer.raw_model), trainer.state.samples


def train_all(folder: Path, layout: Layout) -> dict[str, Any]:
    return {kind: train(folder, kind, layout) for kind in OPTIMIZATIONS}


def train_and_stop_all(folder: Path, layout: Layout) -> dict[str, Any]:
    for kind in OPTIMIZATIONS:
        train(folder / "stopped", kind, layout, STOPS[kind])
    return train_all(folder / "uninterrupted", layout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout | None, dict[str, Any]]:
    """Losses, weights and samples of uninterrupted runs (None), and of runs resumed in each layout."""

    def launch(function: Any, folder: Path, layout: Layout) -> dict[str, Any]:
        ranks = run_distributed(function, layout[0], folder, layout)
        return {
            kind: (losses, {name: row for rank in ranks for name, row in rank[kind][1].items()}, samples)
            for kind, (losses, _, samples) in ranks[0].items()
        }

    folder = tmp_path_factory.mktemp("optimizers")
    found = {None: launch(train_and_stop_all, folder, LAYOUTS[0])}
    for layout in LAYOUTS:
        shutil.copytree(folder / "stopped", folder / str(layout))
        found[layout] = launch(train_all, folder / str(layout), layout)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZATIONS)
def test_resumed_optimizer_equals_an_uninterrupted_one(kind: str, layout: Layout, runs: dict[Any, dict[str, Any]]):
    losses, weights, samples = runs[None][kind]
    resumed_losses, resumed, resumed_samples = runs[layout][kind]
    assert len(losses) == STEPS
    assert samples == resumed_samples
    assert resumed.keys() == weights.keys()
    if layout == LAYOUTS[0]:
        assert resumed_losses == losses[STOPS[kind] :]
        assert all(torch.equal(resumed[name], value) for name, value in weights.items())
    else:
        assert resumed_losses == pytest.approx(losses[STOPS[kind] :], rel=1e-10)
        assert all(relative_difference(resumed[name], weights[name]) < 1e-10 for name in resumed)


def test_experts_load_finds_group_settings_by_parameter_name(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": [*model[0].parameters()], "lr": 3e-2}, {"params": [*model[1].parameters()], "lr": 1e-3}]
    experts.save(tmp_path / "saved", model, torch.optim.SGD(groups))
    other = torch.optim.SGD([{**group, "lr": 1.0} for group in reversed(groups)])
    experts.load(tmp_path / "saved", model, other)
    assert [group["lr"] for group in other.param_groups] == [1e-3, 3e-2]
    with pytest.raises(UserError, match=r"other settings for '0.weight' than for '1.weight'"):
        experts.load(tmp_path / "saved", model, torch.optim.SGD(model.parameters(), lr=1.0))
