"""Runs with optimizers and schedulers that keep settings in parameter groups resume like uninterrupted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lion_pytorch import Lion  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.support.equality import in_float64, relative_difference
from tests.support.helpers import run_distributed
from tests.support.optimizers import GrowingRates, ScheduleFreeSGD
from tests.test_elastic import STEPS, Layout, trainer_of
from tests.test_parity import Trace, by_id
from toolkit import experts
from toolkit.errors import UserError
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.optim import constant
from toolkit.train.trainer import Trainer


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the other parameters, with rates of their own."""
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
    "Lion": lambda model: (Lion(model.parameters(), lr=1e-3), constant()),
    "Adafactor": lambda model: (torch.optim.Adafactor(model.parameters(), lr=1e-2), constant()),
    "NAdam": lambda model: (torch.optim.NAdam(model.parameters(), lr=1e-2), constant()),
    "Muon": lambda model: (experts.Muon(experts.muon_groups(model), lr=1e-2), constant()),
    "ASGD": lambda model: (torch.optim.ASGD(model.parameters(), lr=1e-1, t0=2), constant()),
}
LAYOUTS: list[Layout] = [(2, 2, "copies"), (1, 1, "blocks"), (4, 2, "uneven")]
"""Runs begin in the first. Adafactor's factors are over all experts, so only EP size 1 supports it."""
CUTS = {kind: 1 + number * 3 % (STEPS - 1) for number, kind in enumerate(OPTIMIZATIONS)}
"""Step at which a run is preempted."""


class Preempt(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == self.step:
            trainer.request_stop("SIGTERM")


def train(folder: Path, kind: str, layout: Layout, *, cut: bool = False) -> tuple[list[float], dict[str, Tensor], int]:
    trace = Trace()
    layout = (layout[0], 1, "blocks") if kind == "Adafactor" else layout
    callbacks = [trace, *([Preempt(CUTS[kind])] if cut else []), Checkpointing()]
    make = OPTIMIZATIONS[kind]
    with in_float64(), trainer_of(folder, layout, "loss", callbacks, log_every=1, optimization=make) as trainer:
        trainer.fit()
        return trace.losses, by_id(trainer.raw_model, "weight"), trainer.state.samples


def train_all(folder: Path, layout: Layout) -> dict[tuple[str, str], Any]:
    found = {}
    for kind in OPTIMIZATIONS:
        if layout == LAYOUTS[0]:
            found[kind, "whole"] = train(folder / f"{kind} whole {layout}", kind, layout)
            for after in LAYOUTS:
                train(folder / f"{kind} cut {after}", kind, layout, cut=True)
        found[kind, "resumed"] = train(folder / f"{kind} cut {layout}", kind, layout)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[tuple[str, str], Any]]:
    """What each kind of run learned: uninterrupted on two ranks, and resumed on one, two and four."""
    folder, found = tmp_path_factory.mktemp("optimizers"), {}
    for layout in LAYOUTS:
        ranks = run_distributed(train_all, layout[0], folder, layout, timeout_s=300)
        found[layout[0]] = {}
        for key, (losses, _, samples) in ranks[0].items():
            weights = {name: row for rank in ranks for name, row in rank[key][1].items()}
            found[layout[0]][key] = losses, weights, samples
    return found


@pytest.mark.parametrize("world_size", [2, 1, 4])
@pytest.mark.parametrize("kind", OPTIMIZATIONS)
def test_resumed_run_equals_an_uninterrupted_one(kind: str, world_size: int, runs: dict[int, dict[Any, Any]]):
    losses, weights, samples = runs[LAYOUTS[0][0]][kind, "whole"]
    resumed_losses, resumed, resumed_samples = runs[world_size][kind, "resumed"]
    assert len(losses) == STEPS
    assert samples == resumed_samples
    assert resumed.keys() == weights.keys()
    if world_size == LAYOUTS[0][0]:
        assert resumed_losses == losses[CUTS[kind] :]
        assert all(torch.equal(resumed[name], value) for name, value in weights.items())
    else:
        assert resumed_losses == pytest.approx(losses[CUTS[kind] :], rel=1e-10)
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
