"""Splits, merges, prunes and undo: alignment of experts, outputs, optimizer states and replicated tensors."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from benchmarks.support.processes import run_distributed
from toolkit.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.dynamic.dynamic_router import Hyperplane
from toolkit.dynamic.expert_rows import ExpertRows
from toolkit.dynamic.plans import Grow, Merge, Prune, free_logical_id
from toolkit.dynamic.similarity import alignment, reordered, weight_similarity
from toolkit.dynamic.surgery import DynamicExperts
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.experts.placement.placement import ExpertPlacement

DIM, HIDDEN, LOGICAL, ACTIVE, TOKENS = 6, 5, 8, 4, 48


def trained_layer(seed: int = 0) -> tuple[MoE, DynamicExperts, AdamW]:
    """Return a layer after two steps, so that the moments of its experts differ."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(seed)
    groups, router = make_expert_groups(world), RouterOptions(balance="bias")
    layer = make_dynamic_moe(DIM, HIDDEN, ACTIVE, 2, max_experts=LOGICAL, groups=groups, router=router)
    layer.router.weight.data[:ACTIVE] = torch.randn(ACTIVE, DIM)
    optimizer = AdamW(layer.parameters(), lr=0.01, fused=True)
    ExpertSync(layer, optimizer)
    for _ in range(2):
        (layer(tokens(1)[rank::world]).square().sum() * world).backward()
        if world > 1:
            dist.all_reduce(layer.router.weight.grad)
            layer.router.weight.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    return layer, DynamicExperts(layer), optimizer


def tokens(seed: int = 9) -> Tensor:
    return torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


def outputs(layer: MoE) -> Tensor:
    layer.eval()
    with torch.no_grad():
        return layer(tokens())


def rows_of(experts: DynamicExperts, optimizer: AdamW) -> dict[int, dict[str, Tensor]]:
    """Return weights and moments of experts and router by uid."""
    layer, found = experts.layers[""], {}
    rows, weight = ExpertRows(layer.expert_stack, optimizer), layer.router.weight
    for record in experts.rosters[""].active:
        found[record.uid] = {
            **rows.fetch(record.logical_id),
            "router": weight.data[record.logical_id].clone(),
            **{
                f"router.{key}": optimizer.state[weight][key][record.logical_id].clone()
                for key in ("exp_avg", "exp_avg_sq")
            },
        }
    return found


def random_plane(draws: random.Random) -> Hyperplane:
    normal_D = torch.randn(DIM, generator=torch.Generator().manual_seed(draws.randrange(2**31)))
    return Hyperplane(normal_D, float(normal_D @ tokens()[draws.randrange(TOKENS)]))


def assert_replicated(layer: MoE) -> None:
    if dist.is_initialized():
        for name, value in [("weight", layer.router.weight.data), *layer.router.named_buffers()]:
            copies = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, value.contiguous())
            assert all(torch.equal(copy, value) for copy in copies), name


def assert_cleared(layer: MoE, logical_id: int) -> None:
    place = layer.placement.owner(logical_id)
    if place.rank == layer.expert_stack.groups.ep_rank:
        assert not layer.experts.up[place.slot].any()
        assert not layer.experts.down[place.slot].any()


def split_until_full() -> None:
    draws, (layer, experts, optimizer) = random.Random(5), trained_layer(5)
    before = outputs(layer)
    while (logical_id := free_logical_id(experts.rosters[""], layer.placement)) is not None:
        parent = draws.choice(experts.rosters[""].active)
        known = rows_of(experts, optimizer)
        experts.carry_out("", Grow(parent.uid, logical_id, {}), optimizer, step=3, plane=random_plane(draws))
        new = experts.rosters[""].records[-1].uid
        for uid, values in rows_of(experts, optimizer).items():
            for name, value in known[parent.uid if uid == new else uid].items():
                assert torch.equal(values[name], value), (uid, name)
        torch.testing.assert_close(outputs(layer), before, rtol=0, atol=1e-6)
        assert_replicated(layer)
    used = {record.logical_id for record in experts.rosters[""].active}
    assert len({len(used & set(slots)) for slots in layer.placement.slots}) == 1


def merge_a_permuted_copy() -> None:
    draws, (layer, experts, optimizer) = random.Random(2), trained_layer(2)
    logical_id = free_logical_id(experts.rosters[""], layer.placement)
    experts.carry_out("", Grow(1, logical_id, {}), optimizer, step=3, plane=random_plane(draws))
    before = outputs(layer)
    rows, order = ExpertRows(layer.expert_stack, optimizer), torch.tensor([3, 0, 4, 1, 2])
    rows.write(logical_id, reordered(rows.fetch(logical_id), order))
    torch.testing.assert_close(outputs(layer), before, rtol=0, atol=1e-5)
    known = rows_of(experts, optimizer)
    experts.carry_out("", Merge(4, 1, 0.3, {}), optimizer, step=4)
    assert_replicated(layer)
    after = rows_of(experts, optimizer)
    for name, value in known[1].items():
        if not name.startswith("router."):
            torch.testing.assert_close(after[1][name], value, rtol=1e-5, atol=1e-7)
    assert_cleared(layer, logical_id)
    torch.testing.assert_close(outputs(layer), before, rtol=0, atol=1e-5)
    assert after.keys() == {0, 1, 2, 3}
    assert experts.rosters[""].records[4].merged_into == 1


def prune_an_unused_expert() -> None:
    layer, experts, optimizer = trained_layer()
    layer.router.weight.data[2] = 0
    layer.router.bias[2] = -10
    before, known = outputs(layer), rows_of(experts, optimizer)
    experts.carry_out("", Prune(2, {}), optimizer, step=3)
    assert_replicated(layer)
    for uid, values in rows_of(experts, optimizer).items():
        assert all(torch.equal(values[name], value) for name, value in known[uid].items()), uid
    assert not optimizer.state[layer.router.weight]["exp_avg"][2].any()
    assert_cleared(layer, 2)
    torch.testing.assert_close(outputs(layer), before, rtol=0, atol=1e-6)  # the softmax has one term less


def split_merge_and_prune() -> None:
    split_until_full()
    merge_a_permuted_copy()
    prune_an_unused_expert()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_split_merge_and_prune_keep_outputs_and_moments(world):
    run_distributed(split_merge_and_prune, world)


def test_merge_averages_rows_by_load():
    _, experts, optimizer = trained_layer()
    before = rows_of(experts, optimizer)
    experts.carry_out("", Merge(0, 1, 0.3, {}), optimizer, step=4)
    merged, mine = rows_of(experts, optimizer)[1], before[1]
    in_experts = [{name: row for name, row in rows.items() if "router" not in name} for rows in (before[0], mine)]
    other = {**reordered(in_experts[0], alignment(in_experts[1], in_experts[0])), "router": before[0]["router"]}
    for name, row in other.items():
        torch.testing.assert_close(merged[name], 0.7 * row + 0.3 * mine[name])


def test_undo_restores_model_optimizer_and_roster():
    layer, experts, optimizer = trained_layer()

    def tensors() -> dict[str, Tensor]:
        states = {f"{n}.{key}": v for n, p in layer.named_parameters() for key, v in optimizer.state[p].items()}
        return {name: value.clone() for name, value in (layer.state_dict() | states).items()}

    experts.carry_out("", Grow(1, 4, {}), optimizer, step=3, plane=random_plane(random.Random(0)))
    before, roster, expected = tensors(), experts.rosters[""], outputs(layer)
    undo = experts.undo_point(optimizer)
    experts.carry_out("", Grow(2, 5, {}), optimizer, step=4, plane=random_plane(random.Random(1)))
    experts.carry_out("", Merge(0, 1, 0.3, {}), optimizer, step=4)
    layer.router.bias += 1
    changed = {name for name, value in tensors().items() if not torch.equal(value, before[name])}
    assert changed > {"router.active_E", "router.bias", "router.weight.exp_avg", "experts.up", "experts.up.exp_avg"}
    assert [event.kind for event in undo()] == ["grow", "merge"]
    assert [name for name, value in tensors().items() if not torch.equal(value, before[name])] == []
    assert experts.rosters[""] == roster
    assert [event.kind for event in experts.history] == ["grow"]
    assert torch.equal(outputs(layer), expected)


def test_replicated_experts_raise():
    layer = make_moe(DIM, HIDDEN, 2, 1)
    layer.expert_stack.dispatcher.placement = ExpertPlacement(((0, 1), (1, -1)))
    with pytest.raises(ValueError, match="replicated experts"):
        ExpertRows(layer.expert_stack, None)


def test_prune_clears_gradients():
    layer, experts, optimizer = trained_layer()
    layer(tokens()).sum().backward()
    experts.carry_out("", Prune(0, {}), optimizer, step=1)
    assert [p.grad for p in (layer.experts.up, layer.experts.down, layer.router.weight)] == [None] * 3


def expert_rows(seed: int, *, gated: bool = False) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    up = torch.randn(24 if gated else 12, 7, generator=draws)
    return {"up": up, "down": torch.randn(12, 7, generator=draws), "up.exp_avg": up * 2}


@pytest.mark.parametrize("gated", [False, True])
def test_alignment_reorders_a_permuted_expert(gated):
    expert, order = expert_rows(0, gated=gated), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    other = reordered(expert, order)
    assert not torch.equal(other["up"], expert["up"])
    back = reordered(other, alignment(expert, other))
    for name, rows in expert.items():
        assert torch.equal(back[name], rows), name
    assert weight_similarity(expert, other) == pytest.approx(1)


def test_similarity_ignores_how_scale_is_split_between_up_and_down():
    expert = expert_rows(0)
    factors = torch.rand(12, 1, generator=torch.Generator().manual_seed(2)) + 0.5
    other = {"up": expert["up"] * factors, "down": expert["down"] / factors}
    assert weight_similarity(expert, other) == pytest.approx(1)
