"""Splits, merges and prunes on one, two and four ranks: outputs, optimizer states and replicated tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from tests.support.helpers import run_distributed
from toolkit.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.dynamic.dynamic_router import DynamicRouter, Hyperplane
from toolkit.dynamic.expert_rows import ExpertRows
from toolkit.dynamic.plans import Grow, Merge, Prune, free_logical_id
from toolkit.dynamic.roster import ExpertRoster
from toolkit.dynamic.similarity import reordered
from toolkit.dynamic.surgery import DynamicExperts
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.experts.placement.placement import ExpertPlacement

DIM, HIDDEN, LOGICAL, ACTIVE, TOKENS = 6, 5, 8, 4, 48
WORLDS = [1, 2, 4]


def trained_layer(seed: int = 0) -> tuple[MoE, DynamicExperts, AdamW]:
    """After two steps, so that every expert has moments of its own."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(seed)
    groups, router = make_expert_groups(world), RouterOptions(balance="bias")
    layer = make_dynamic_moe(DIM, HIDDEN, ACTIVE, 2, max_experts=LOGICAL, groups=groups, router=router)
    layer.router.weight.data[:ACTIVE] = torch.randn(ACTIVE, DIM)
    sync = ExpertSync(layer.parameters())
    optimizer = AdamW(layer.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        (layer(tokens(1)[rank::world]).square().sum() * world).backward()
        if world > 1:
            dist.all_reduce(layer.router.weight.grad)
            layer.router.weight.grad /= world
        sync.before_clip()
        optimizer.step()
        optimizer.zero_grad()
    return layer, DynamicExperts(layer), optimizer


def tokens(seed: int = 9) -> Tensor:
    return torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


def outputs(layer: MoE) -> Tensor:
    """Of all ranks' tokens, together."""
    layer.eval()
    with torch.no_grad():
        return layer(tokens())


def rows_of(experts: DynamicExperts, optimizer: AdamW) -> dict[int, dict[str, Tensor]]:
    """Weights and moments by uid, those of the router included."""
    layer, found = experts.layers[""], {}
    rows, router = ExpertRows(layer.expert_stack, optimizer), layer.router
    for record in experts.rosters[""].active:
        state = optimizer.state[router.weight]
        found[record.uid] = {
            **rows.fetch(record.logical_id),
            "router": router.weight.data[record.logical_id].clone(),
            **{f"router.{key}": state[key][record.logical_id].clone() for key in ("exp_avg", "exp_avg_sq")},
        }
    return found


def random_plane(draws: random.Random) -> Hyperplane:
    normal_D = torch.randn(DIM, generator=torch.Generator().manual_seed(draws.randrange(2**31)))
    return Hyperplane(normal_D, float(normal_D @ tokens()[draws.randrange(TOKENS)]))


def assert_replicated(layer: MoE) -> None:
    """The replicated tensors are equal on all ranks."""
    if not dist.is_initialized():
        return
    for name, value in [("weight", layer.router.weight.data), *layer.router.named_buffers()]:
        copies = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, value.contiguous())
        assert all(torch.equal(copy, value) for copy in copies), name


def splits_in_a_row(seed: int) -> float:
    draws, (layer, experts, optimizer) = random.Random(seed), trained_layer(seed)
    assert isinstance(layer.router, DynamicRouter)
    before, worst = outputs(layer), 0.0
    while (logical_id := free_logical_id(experts.rosters[""], layer.placement)) is not None:
        parent = draws.choice(experts.rosters[""].active)
        known = rows_of(experts, optimizer)
        experts.carry_out("", Grow(parent.uid, logical_id, {}), optimizer, step=3, plane=random_plane(draws))
        after, new = rows_of(experts, optimizer), experts.rosters[""].records[-1].uid
        for name, value in known[parent.uid].items():
            assert torch.equal(after[new][name], value), f"{name} of the new expert"
        for uid, values in known.items():
            assert all(torch.equal(after[uid][name], value) for name, value in values.items()), uid
        worst = max(worst, float((outputs(layer) - before).abs().max()))
        assert_replicated(layer)
    used = {record.logical_id for record in experts.rosters[""].active}
    active = [len(used & set(layer.placement.slots[rank])) for rank in range(layer.placement.ranks)]
    assert max(active) == min(active)
    return worst


@pytest.mark.parametrize("world", WORLDS)
def test_splits_change_no_output_and_copy_moments(world: int) -> None:
    for worst in run_distributed(splits_in_a_row, world, 5):
        assert worst < 1e-6


def split_and_merge(seed: int) -> tuple[float, ExpertRoster]:
    """An expert is split, the units of the new one are permuted, and both are merged again."""
    draws, (layer, experts, optimizer) = random.Random(seed), trained_layer(seed)
    logical_id = free_logical_id(experts.rosters[""], layer.placement)
    assert logical_id is not None
    experts.carry_out("", Grow(1, logical_id, {}), optimizer, step=3, plane=random_plane(draws))
    before = outputs(layer)
    rows = ExpertRows(layer.expert_stack, optimizer)
    rows.write(
        logical_id,
        reordered(rows.fetch(logical_id), torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(seed))),
    )
    permuted = outputs(layer)
    assert float((permuted - before).abs().max()) < 1e-5
    known = rows_of(experts, optimizer)
    experts.carry_out("", Merge(4, 1, 0.3, {}), optimizer, step=4)
    assert_replicated(layer)
    after = rows_of(experts, optimizer)
    for name, value in known[1].items():
        if not name.startswith("router."):
            torch.testing.assert_close(after[1][name], value, rtol=1e-5, atol=1e-7, msg=f"{name} of the heir")
    assert 4 not in after
    assert not any(t[layer.placement.owner(logical_id).slot].any() for t in _here(layer, logical_id))
    return float((outputs(layer) - permuted).abs().max()), experts.rosters[""]


def _here(layer: MoE, logical_id: int) -> list[Tensor]:
    on_this_rank = layer.placement.owner(logical_id).rank == layer.expert_stack.groups.ep_rank
    return [layer.experts.up, layer.experts.down] if on_this_rank else []


@pytest.mark.parametrize("world", WORLDS)
def test_merging_equal_experts_with_permuted_units_keeps_the_outputs(world: int) -> None:
    for change, roster in run_distributed(split_and_merge, world, 2):
        assert change < 1e-5
        assert [record.uid for record in roster.active] == [0, 1, 2, 3]
        assert roster.records[4].merged_into == 1


def test_merge_weights_the_router_rows_by_load() -> None:
    _, experts, optimizer = trained_layer()
    before = rows_of(experts, optimizer)
    experts.carry_out("", Merge(0, 1, 0.3, {}), optimizer, step=4)
    expected = 0.7 * before[0]["router"] + 0.3 * before[1]["router"]
    torch.testing.assert_close(rows_of(experts, optimizer)[1]["router"], expected)


def prune_an_unused_expert() -> tuple[float, bool, bool]:
    layer, experts, optimizer = trained_layer()
    layer.router.weight.data[2] = 0
    layer.router.bias[2] = -10
    before, known = outputs(layer), rows_of(experts, optimizer)
    experts.carry_out("", Prune(2, {}), optimizer, step=3)
    assert_replicated(layer)
    after = rows_of(experts, optimizer)
    same = all(torch.equal(after[uid][n], v) for uid in (0, 1, 3) for n, v in known[uid].items())
    state = optimizer.state[layer.router.weight]
    cleared = not state["exp_avg"][2].any() and not any(t[layer.placement.owner(2).slot].any() for t in _here(layer, 2))
    return float((outputs(layer) - before).abs().max()), same, bool(cleared)


@pytest.mark.parametrize("world", WORLDS)
def test_pruning_an_unused_expert_keeps_the_outputs(world: int) -> None:
    for change, others_as_before, cleared in run_distributed(prune_an_unused_expert, world):
        assert change < 1e-6  # the softmax has one term less
        assert others_as_before
        assert cleared


def test_replicated_experts_are_refused() -> None:
    layer = make_moe(DIM, HIDDEN, 2, 1)
    layer.expert_stack.dispatcher.placement = ExpertPlacement(((0, 1), (1, -1)))
    with pytest.raises(ValueError, match="replicated experts"):
        ExpertRows(layer.expert_stack, None)


def test_gradients_are_cleared() -> None:
    layer, experts, optimizer = trained_layer()
    layer(tokens()).sum().backward()
    experts.carry_out("", Prune(0, {}), optimizer, step=1)
    left: list[Any] = [p.grad for p in (layer.experts.up, layer.experts.down, layer.router.weight)]
    assert left == [None] * 3
