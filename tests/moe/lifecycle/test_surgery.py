"""Births, mergers and ends on one, two and four ranks: what they must not change, and what has to go along."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from tests.helpers import run_distributed
from toolkit.moe.layer import MoE, make_moe
from toolkit.moe.lifecycle.alignment import reordered
from toolkit.moe.lifecycle.plans import Grow, Merge, Prune, free_logical_id
from toolkit.moe.lifecycle.roster import ExpertRoster
from toolkit.moe.lifecycle.router import DynamicRouter
from toolkit.moe.lifecycle.rows import ExpertRows
from toolkit.moe.lifecycle.surgery import Divider, Surgeon
from toolkit.parallel.gradients import average_owned_gradients
from toolkit.parallel.groups import make_expert_groups
from toolkit.parallel.ownership import owned
from toolkit.placement.placement import ExpertPlacement

DIM, HIDDEN, LOGICAL, ACTIVE, TOKENS = 6, 5, 8, 4, 48
WORLDS = [1, 2, 4]


def a_trained_layer(seed: int = 0) -> tuple[MoE, Surgeon, AdamW]:
    """After two steps, so that every expert has moments of its own."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(seed)
    layer = make_moe(
        DIM, HIDDEN, ACTIVE, 2, groups=make_expert_groups(world), logical_experts=LOGICAL, bias_balancing=True
    )
    layer.router.weight.data[:ACTIVE] = torch.randn(ACTIVE, DIM)
    rows = owned(layer.parameters())
    optimizer = AdamW(layer.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        layer(tokens(1)[rank::world]).square().sum().backward()
        if world > 1:
            dist.all_reduce(layer.router.weight.grad)
        average_owned_gradients(rows, 1)
        optimizer.step()
        optimizer.zero_grad()
    return layer, Surgeon(layer, ExpertRoster.initial(ACTIVE, LOGICAL), optimizer, seed=seed), optimizer


def tokens(seed: int = 9) -> Tensor:
    return torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


def outputs(layer: MoE) -> Tensor:
    """Of all ranks' tokens, together."""
    layer.eval()
    with torch.no_grad():
        return layer(tokens())


def rows_of(surgeon: Surgeon, optimizer: AdamW) -> dict[int, dict[str, Tensor]]:
    """Weights and moments by expert id, those of the router included."""
    rows, router, found = ExpertRows(surgeon.layer.expert_stack, optimizer), surgeon.router, {}
    for record in surgeon.roster.active:
        state = optimizer.state[router.weight]
        found[record.id] = {
            **rows.fetch(record.logical_id),
            "router": router.weight.data[record.logical_id].clone(),
            **{f"router.{key}": state[key][record.logical_id].clone() for key in ("exp_avg", "exp_avg_sq")},
        }
    return found


def a_divider(draws: random.Random) -> Divider:
    direction_D = torch.randn(DIM, generator=torch.Generator().manual_seed(draws.randrange(2**31)))
    return Divider(direction_D, float(direction_D @ tokens()[draws.randrange(TOKENS)]))


def assert_replicated(layer: MoE) -> None:
    """What every rank has a copy of is the same on all."""
    if not dist.is_initialized():
        return
    for name, value in [("weight", layer.router.weight.data), *layer.router.named_buffers()]:
        copies = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, value.contiguous())
        assert all(torch.equal(copy, value) for copy in copies), name


def splits_in_a_row(seed: int) -> float:
    draws, (layer, surgeon, optimizer) = random.Random(seed), a_trained_layer(seed)
    assert isinstance(layer.router, DynamicRouter)
    before, worst = outputs(layer), 0.0
    while (logical_id := free_logical_id(surgeon.roster, layer.placement)) is not None:
        parent = draws.choice(surgeon.roster.active)
        known = rows_of(surgeon, optimizer)
        surgeon.carry_out(Grow(parent.id, logical_id, False, {}), step=3, divider=a_divider(draws))
        after, created_at = rows_of(surgeon, optimizer), surgeon.roster.records[-1].id
        for name, value in known[parent.id].items():
            assert torch.equal(after[created_at][name], value), f"the newborn's {name}"
        for id, values in known.items():
            assert all(torch.equal(after[id][name], value) for name, value in values.items()), id
        worst = max(worst, float((outputs(layer) - before).abs().max()))
        assert_replicated(layer)
    sits = {record.logical_id for record in surgeon.roster.active}
    active = [len(sits & set(layer.placement.experts_on(rank))) for rank in range(layer.placement.ranks)]
    assert max(active) == min(active)
    return worst


@pytest.mark.parametrize("world", WORLDS)
def test_splits_change_no_output_and_moments_go_along(world: int) -> None:
    for worst in run_distributed(splits_in_a_row, world, 5):
        assert worst < 1e-6


def a_merger_of_twins(seed: int) -> tuple[float, ExpertRoster]:
    """A half is scrambled, which changes nothing it says, and merged with its other half."""
    draws, (layer, surgeon, optimizer) = random.Random(seed), a_trained_layer(seed)
    logical_id = free_logical_id(surgeon.roster, layer.placement)
    assert logical_id is not None
    surgeon.carry_out(Grow(1, logical_id, False, {}), step=3, divider=a_divider(draws))
    before = outputs(layer)
    rows = ExpertRows(layer.expert_stack, optimizer)
    rows.write(
        logical_id,
        reordered(rows.fetch(logical_id), torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(seed))),
    )
    scrambled = outputs(layer)
    assert float((scrambled - before).abs().max()) < 1e-5
    known = rows_of(surgeon, optimizer)
    surgeon.carry_out(Merge(4, 1, 0.3, {}), step=4)
    assert_replicated(layer)
    after = rows_of(surgeon, optimizer)
    for name, value in known[1].items():
        if not name.startswith("router."):
            torch.testing.assert_close(after[1][name], value, rtol=1e-5, atol=1e-7, msg=f"the heir's {name}")
    assert 4 not in after
    assert not any(t[layer.placement.owner(logical_id).slot].any() for t in _here(layer, logical_id))
    return float((outputs(layer) - scrambled).abs().max()), surgeon.roster


def _here(layer: MoE, logical_id: int) -> list[Tensor]:
    on_this_rank = layer.placement.owner(logical_id).rank == layer.expert_stack.groups.ep_rank
    return [layer.experts.up, layer.experts.down] if on_this_rank else []


@pytest.mark.parametrize("world", WORLDS)
def test_merging_two_equal_but_permuted_experts_changes_next_to_nothing(world: int) -> None:
    for change, roster in run_distributed(a_merger_of_twins, world, 2):
        assert change < 1e-5
        assert [record.id for record in roster.active] == [0, 1, 2, 3]
        assert roster.records[4].merged_into == 1


def an_end_without_mourners() -> tuple[float, bool, bool]:
    layer, surgeon, optimizer = a_trained_layer()
    layer.router.weight.data[2] = 0
    layer.router.bias[2] = -10
    before, known = outputs(layer), rows_of(surgeon, optimizer)
    surgeon.carry_out(Prune(2, {}), step=3)
    assert_replicated(layer)
    after = rows_of(surgeon, optimizer)
    same = all(torch.equal(after[id][n], v) for id in (0, 1, 3) for n, v in known[id].items())
    state = optimizer.state[layer.router.weight]
    cleared = not state["exp_avg"][2].any() and not any(t[layer.placement.owner(2).slot].any() for t in _here(layer, 2))
    return float((outputs(layer) - before).abs().max()), same, bool(cleared)


@pytest.mark.parametrize("world", WORLDS)
def test_pruning_an_expert_that_nobody_uses_changes_nothing(world: int) -> None:
    for change, others_as_before, cleared in run_distributed(an_end_without_mourners, world):
        assert change < 1e-6  # the softmax has one term less to add up
        assert others_as_before
        assert cleared


def a_fresh_birth() -> dict[str, Tensor]:
    layer, surgeon, optimizer = a_trained_layer()
    logical_id = free_logical_id(surgeon.roster, layer.placement)
    assert logical_id is not None
    surgeon.carry_out(Grow(1, logical_id, True, {}), step=3, divider=Divider(torch.ones(DIM), 0.0))
    return rows_of(surgeon, optimizer)[4]


def test_a_fresh_expert_is_what_it_would_have_been_from_the_start() -> None:
    expected = make_moe(DIM, HIDDEN, LOGICAL, 2).experts
    for world in (1, 2):
        for created_at in run_distributed(a_fresh_birth, world):
            assert torch.equal(created_at["up"], expected.up[4])
            assert torch.equal(created_at["down"], expected.down[4])
            assert not any(
                created_at[f"{name}.{key}"].any() for name in ("up", "down") for key in ("exp_avg", "exp_avg_sq")
            )


def test_experts_that_have_copies_are_refused() -> None:
    layer = make_moe(DIM, HIDDEN, 2, 1)
    layer.expert_stack.dispatcher.placement = ExpertPlacement(((0, 1), (1, -1)))
    with pytest.raises(ValueError, match="have copies"):
        ExpertRows(layer.expert_stack, None)


def test_a_layer_without_seats_is_refused() -> None:
    with pytest.raises(ValueError, match="no seats"):
        Surgeon(make_moe(DIM, HIDDEN, 2, 1), ExpertRoster.initial(2, 2), None)


def test_gradients_of_the_step_before_are_dropped() -> None:
    layer, surgeon, _ = a_trained_layer()
    layer(tokens()).sum().backward()
    surgeon.carry_out(Prune(0, {}), step=1)
    left: list[Any] = [p.grad for p in (layer.experts.up, layer.experts.down, layer.router.weight)]
    assert left == [None] * 3
