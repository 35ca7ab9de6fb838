"""Copies of sharded models: averages equal one process's, whatever happened to placements since a copy was made."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.support.equality import in_float64
from tests.support.helpers import run_distributed
from toolkit import experts
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel import collectives

EXPERTS, DIM, DECAY = 4, 6, 0.75
X = torch.randn(8, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Experts(nn.Module):
    """Another library's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, DIM))

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (torch.einsum("td,tkdf->tkf", hidden, self.up[ids]).tanh() * weights[..., None]).sum(1)


class Theirs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return self.experts(x, ids, weights)


def build(kind: str, groups: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = make_moe(DIM, 5, EXPERTS, 2, groups=groups) if kind == "ours" else Theirs()
    return nn.Sequential(nn.Linear(DIM, DIM), layer)


def change(model: nn.Module, by: float) -> None:
    """Change each expert by its id."""
    with torch.no_grad():
        for parameter in model.parameters():
            ownership: Any = getattr(parameter, "ownership", None)
            ids = torch.zeros(1) if ownership is None else torch.tensor(ownership.row_ids, dtype=torch.float64)
            parameter += by * (1 + ids.view(-1, *[1] * (parameter.ndim - 1)))


def averaged(kind: str, made: str, placements: list[experts.ExpertPlacement], folder: Path) -> Tensor:
    """Output of an average for all tokens, after the experts of the model moved."""
    with in_float64():
        world = collectives.world_size()
        groups = experts.make_expert_groups(world)
        model = build(kind, groups)
        full = copy.deepcopy(model) if made == "before" else None
        if kind == "theirs":
            experts.shard_experts(model, groups)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = full or (experts.full_copy(model) if made == "full" else copy.deepcopy(model))
        average.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, placement in enumerate(placements):
                change(model, 0.1)
                experts.place_experts(model, placement, None)
                if number == 1:
                    experts.save(folder / "saved", model, optimizer)
                    experts.place_experts(model, placements[0], None)
                    experts.load(folder / "saved", model, optimizer)
                experts.ema_update(average, model, DECAY)
        return average(X)


@pytest.mark.parametrize(
    ("kind", "made"), [("theirs", "before"), ("theirs", "full"), ("ours", "full"), ("ours", "deep")]
)
@pytest.mark.parametrize("world", [2, 4])
def test_ema_update_after_moves_and_load_equals_one_process(kind: str, made: str, world: int, tmp_path: Path) -> None:
    orders = [(2, 0, 3, 1), (1, 3, 0, 2)]
    placements = [experts.ExpertPlacement(tuple(order[rank::world] for rank in range(world))) for order in orders]
    alone = [experts.ExpertPlacement((tuple(range(EXPERTS)),))] * 2
    (expected,) = run_distributed(averaged, 1, kind, made, alone, tmp_path)
    for found in run_distributed(averaged, world, kind, made, placements, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def copy_then_load(folder: Path) -> list[str]:
    model = build("ours", experts.make_expert_groups(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    experts.place_experts(model, experts.ExpertPlacement(((3, 1), (0, 2))), optimizer)
    experts.save(folder, model, optimizer)
    model = build("ours", experts.make_expert_groups(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        experts.load(folder, model, optimizer)
    assert len(list(kept.parameters())) == 5
    return [str(warning.message) for warning in caught]


def test_load_that_moves_experts_away_from_a_copy_warns(tmp_path: Path) -> None:
    for said in run_distributed(copy_then_load, 2, tmp_path / "saved"):
        assert any("ema_update" in line for line in said)


def test_ema_update_of_wrapped_models_updates_the_models_within() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema = AveragedModel(model)
    change(model, 1.0)
    model[1].running_mean += 1
    experts.ema_update(ema, torch.compile(model), 0.5)
    torch.testing.assert_close(ema.module[0].weight, model[0].weight - 0.5)
    assert ema.module[1].running_mean.tolist() == [1, 1]


def test_ema_update_of_another_model_raises() -> None:
    with pytest.raises(UserError, match="averaged: parameter 'bias'"):
        experts.ema_update(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
