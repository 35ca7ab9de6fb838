"""Averages of models with sharded experts, while experts migrate, compared with the formula."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from benchmarks.support.precision import in_float64
from benchmarks.support.processes import run_distributed
from tests.parity.models import RoutedExperts
from toolkit import experts
from toolkit.errors import UserError
from toolkit.experts.parallel.ownership import local_rows, ownership_of

EXPERTS, DIM, DECAY = 4, 6, 0.9
X = torch.randn(8, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def build(kind: str, groups: experts.ExpertGroups | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layer = experts.make_moe(DIM, 5, EXPERTS, 2, groups=groups) if kind == "make_moe" else RoutedExperts(EXPERTS, DIM)
    return nn.Sequential(nn.Linear(DIM, DIM), layer)


@torch.no_grad()
def change(model: nn.Module, by: float) -> None:
    """Add `by` to each parameter, and the id times `by` to each expert's row."""
    for parameter in model.parameters():
        ownership, here = ownership_of(parameter), local_rows(parameter)
        rows = range(EXPERTS) if ownership is None else ownership.row_ids
        ids = torch.tensor(rows if parameter.ndim == 3 else [0]).to(here)
        here += by * (1 + ids.view(-1, *[1] * (parameter.ndim - 1)))


def averaged(kind: str, made: str, world: int, folder: Path) -> Tensor:
    """Return the output of an average of sharded experts that migrate before each update."""
    orders, shards = [(2, 0, 3, 1), (1, 3, 0, 2)], experts.ExpertShards() if made == "FSDP2" and world > 1 else None
    ep_size = world if shards is None else world // 2
    placements = [experts.ExpertPlacement(tuple(order[rank::ep_size] for rank in range(ep_size))) for order in orders]
    with in_float64():
        groups = experts.make_expert_groups(ep_size)
        model = build(kind, groups)
        full = copy.deepcopy(model) if made == "before" else None
        if kind == "foreign":
            experts.shard_experts(model, groups, shards=shards)
        if shards is not None:
            fully_shard(model, ignored_params=set(model[1].experts.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = full or (copy.deepcopy(model) if made == "deepcopy" else experts.full_copy(model))
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
    ("kind", "made"),
    [
        ("foreign", "before"),
        ("foreign", "full_copy"),
        ("foreign", "FSDP2"),
        ("make_moe", "full_copy"),
        ("make_moe", "deepcopy"),
    ],
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ema_update_after_migrations_and_load_equals_the_formula(kind: str, made: str, world: int, tmp_path: Path):
    with in_float64():
        model = build(kind)
        average = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(2):
            change(model, 0.1)
            average = {name: DECAY * average[name] + (1 - DECAY) * value for name, value in model.state_dict().items()}
        expected = functional_call(model, average, X)
    for found in run_distributed(averaged, world, kind, made, world, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_load_that_migrates_experts_away_from_a_copy_warns(tmp_path: Path):
    model = build("make_moe")
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.1), model[1].placement
    experts.place_experts(model, experts.ExpertPlacement(((3, 1, 0, 2),)), optimizer)
    experts.save(tmp_path / "saved", model, optimizer)
    experts.place_experts(model, start, optimizer)
    copied = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="ema_update"):
        experts.load(tmp_path / "saved", model, optimizer)
    assert copied[1].placement == start


def test_ema_update_of_wrapped_models_updates_the_inner_models():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema = AveragedModel(model)
    change(model, 1.0)
    model[1].running_mean += 1
    experts.ema_update(ema, torch.compile(model), 0.9)
    torch.testing.assert_close(ema.module[0].weight, model[0].weight - 0.9)
    assert ema.module[1].running_mean.tolist() == [1, 1]


def test_ema_update_of_a_different_model_raises():
    with pytest.raises(UserError, match="averaged: parameter 'bias'"):
        experts.ema_update(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
