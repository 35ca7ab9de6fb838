"""One device, many slots: what several ranks do with placements, as far as one can show it. On a GPU with `-m gpu`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.state import checkpoint_files

EXPERTS, SLOTS, DIM, STEPS = 6, 9, 16, 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def some_placement(seed: int) -> ExpertPlacement:
    """Six experts anywhere in nine slots of one rank."""
    slots = [*range(EXPERTS), *[EMPTY_ROW] * (SLOTS - EXPERTS)]
    random.Random(seed).shuffle(slots)
    return ExpertPlacement((tuple(slots),))


def build(
    device: str, dtype: torch.dtype, placement: ExpertPlacement | InitialPlacement
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = make_moe(DIM, 24, EXPERTS, 2, placement=placement, activation="swiglu")
    model = nn.Sequential(nn.Linear(DIM, DIM), layer, nn.Linear(DIM, 3)).to(device, dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, move: bool) -> list[Tensor]:
    """Losses and clipped norms of a few steps; with `move` experts change slots after each."""
    draws, parameter = torch.Generator().manual_seed(1), next(model.parameters())
    found = []
    for step in range(STEPS):
        x = torch.randn(40, DIM, generator=draws, dtype=torch.float64).to(parameter)
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), ExpertSync([]).clip(model.parameters(), 0.05)]
        optimizer.step()
        optimizer.zero_grad()
        for stack in expert_stacks(model).values() if move else ():
            migrate(stack, some_placement(100 + step), optimizer)
    return found


def by_id(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments; of experts row by row."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        ownership = ownership_of(parameter)
        for key, value in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            if ownership is None or value.ndim == 0:
                found[f"{name} {key}"] = value.clone()
            else:
                rows = zip(ownership.row_ids, value, strict=True)
                found |= {f"{name}/{row_id} {key}": row.clone() for row_id, row in rows if row_id != EMPTY_ROW}
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_experts_that_change_slots_after_every_step_learn_the_same(
    device: str, dtype: torch.dtype, tolerance: float
) -> None:
    still, moving = build(device, dtype, "contiguous"), build(device, dtype, some_placement(0))
    for expected, found in zip(train(*still, move=False), train(*moving, move=True), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    expected_rows, rows = by_id(*still), by_id(*moving)
    assert rows.keys() == expected_rows.keys()
    for name, expected in expected_rows.items():
        torch.testing.assert_close(rows[name], expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_what_one_order_of_slots_saved_another_loads_without_a_difference(device: str, tmp_path: Path) -> None:
    model, optimizer = build(device, torch.float32, some_placement(1))
    train(model, optimizer, move=True)
    checkpoint_files.save(tmp_path / "saved", model, optimizer)
    other, its_optimizer = build(device, torch.float32, some_placement(2))
    checkpoint_files.load(tmp_path / "saved", other, its_optimizer)
    saved, loaded = by_id(model, optimizer), by_id(other, its_optimizer)
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
