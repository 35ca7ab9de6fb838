"""Which assignments a capacity drops, compared with loops; dropped ones are not sent and have weight 0."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.helpers import run_distributed
from toolkit.experts.layer.capacity import within_capacity
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement

EXPERTS, TOP_K, DIM = 4, 2, 8


def draw_assignments(tokens: int = 23, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Expert ids in favour of the first experts, and weights of which many are equal."""
    generator = torch.Generator().manual_seed(seed)
    favour = torch.tensor([6.0, 3.0, 1.0, 0.2]).expand(tokens, EXPERTS)
    ids_TK = favour.multinomial(TOP_K, generator=generator)
    return ids_TK, torch.randint(1, 6, ids_TK.shape, generator=generator) / 6


def oracle(ids_TK: Tensor, weights_TK: Tensor, factor: float) -> list[list[bool]]:
    limit = math.ceil(factor * ids_TK.numel() / EXPERTS)
    kept = torch.zeros_like(ids_TK, dtype=torch.bool)
    for expert in range(EXPERTS):
        assignments = [(t, k) for t, k in (ids_TK == expert).nonzero().tolist()]
        assignments.sort(key=lambda pair: -weights_TK[pair].item())
        for pair in assignments[:limit]:
            kept[pair] = True
    return kept.tolist()


@pytest.mark.parametrize("factor", [0.1, 0.75, 1.0, 1.5, 100.0])
def test_within_capacity_drops_the_lowest_weights(factor: float) -> None:
    ids_TK, weights_TK = draw_assignments()
    kept_TK = within_capacity(ids_TK, weights_TK, EXPERTS, factor)
    assert kept_TK.tolist() == oracle(ids_TK, weights_TK, factor)
    assert bool(kept_TK.all()) == (factor == 100.0)
    assert within_capacity(ids_TK[:0], weights_TK[:0], EXPERTS, factor).shape == (0, TOP_K)


def replicas_of_rank(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Uneven shares of the assignments; rank 1 has none."""
    ids_TK, weights_TK = draw_assignments()
    first = [0, 9, 9, 23] if world == 3 else [0, 15, 23]
    return ids_TK[first[rank] : first[rank + 1]], weights_TK[first[rank] : first[rank + 1]]


def kept_on_one_rank() -> dict[float, list[list[bool]]]:
    ids_TK, weights_TK = replicas_of_rank(dist.get_rank(), dist.get_world_size())
    return {factor: within_capacity(ids_TK, weights_TK, EXPERTS, factor).tolist() for factor in (0.5, 1.0)}


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together_drop_what_one_process_drops(world: int) -> None:
    ranks = run_distributed(kept_on_one_rank, world)
    for factor in ranks[0]:
        assert [token for rank in ranks for token in rank[factor]] == oracle(*draw_assignments(), factor)


def layer_on(world: int, **options: Any) -> MoE:
    torch.manual_seed(1)
    layer = make_moe(DIM, 12, EXPERTS, TOP_K, groups=make_expert_groups(world), **options)
    torch.nn.init.normal_(layer.router.weight)
    return layer


def every_replica_computed(layer: MoE, x_TD: Tensor, kept_TK: Tensor) -> Tensor:
    """The layer's result with each expert applied to each token, and weight 0 for dropped assignments."""
    routing = layer.router(x_TD)
    up_SFD, down_SFD = layer.experts.up, layer.experts.down
    all_TED = torch.einsum("tef,efd->ted", torch.einsum("td,efd->tef", x_TD, up_SFD).relu(), down_SFD)
    chosen_TKD = all_TED[torch.arange(len(x_TD)).unsqueeze(1), routing.expert_ids_TK]
    return ((routing.weights_TK * kept_TK).unsqueeze(-1) * chosen_TKD).sum(1)


def gradients(layer: MoE, y_TD: Tensor, x_TD: Tensor) -> list[Tensor]:
    wanted = [x_TD, layer.router.weight, layer.experts.up, layer.experts.down]
    return list(torch.autograd.grad(y_TD.square().sum(), wanted))


def test_layer_with_dropped_pairs_computes_the_rest_exactly() -> None:
    layer = layer_on(1, capacity_factor=0.75).double()
    x_TD = torch.randn(30, DIM, dtype=torch.float64, requires_grad=True)
    routing = layer.router(x_TD)
    kept_TK = torch.tensor(oracle(routing.expert_ids_TK, routing.weights_TK, 0.75))
    expected = every_replica_computed(layer, x_TD, kept_TK)
    y_TD = layer(x_TD)
    torch.testing.assert_close(y_TD, expected)
    torch.testing.assert_close(gradients(layer, y_TD, x_TD), gradients(layer, expected, x_TD))
    routed_E = routing.expert_ids_TK.flatten().bincount(minlength=EXPERTS)
    assert layer.load_E.tolist() == layer.last_load_E.tolist() == routed_E.tolist()
    dropped_E = layer.expert_stack.log.dropped_E
    assert dropped_E.tolist() == (routed_E - 12).clamp(min=0).tolist()  # ceil(0.75 * 60 / 4) = 12
    assert 0 < dropped_E.sum() == (~kept_TK).sum()


def test_nothing_is_dropped_or_counted_in_evaluation() -> None:
    layer, x_TD = layer_on(1, capacity_factor=0.5).eval(), torch.randn(30, DIM)
    torch.testing.assert_close(layer(x_TD), layer_on(1)(x_TD))
    assert layer.expert_stack.log.dropped_E.tolist() == [0] * EXPERTS


REPLICATED = ExpertPlacement(((0, 1, 2), (3, 1)))
"""Expert 1 has a replica on both ranks."""


def layers_on_one_rank() -> dict[bool, dict[str, Any]]:
    rank, found = dist.get_rank(), {}
    for placement in ("contiguous", REPLICATED):
        layer = layer_on(2, capacity_factor=0.6, placement=placement)
        y_TD = layer(batch().split([13, 27])[rank])
        y_TD.square().sum().backward()
        found[placement is REPLICATED] = {
            "y": y_TD.detach(),
            "router": layer.router.weight.grad,
            "up": 2 * layer.experts.up.grad,  # a mean over the ranks' batches
            "dropped": layer.expert_stack.log.dropped_E,
            "load": layer.load_E,
        }
    return found


def batch() -> Tensor:
    return torch.randn(40, DIM, generator=torch.Generator().manual_seed(5))


def test_ranks_together_compute_what_one_process_computes() -> None:
    ranks = run_distributed(layers_on_one_rank, 2)
    for replicated in ranks[0]:
        found = {name: [rank[replicated][name] for rank in ranks] for name in ranks[0][replicated]}
        layer = layer_on(1, capacity_factor=0.6)
        y_TD = layer(batch())
        y_TD.square().sum().backward()
        up_grad = layer.experts.up.grad
        assert up_grad is not None
        torch.testing.assert_close(torch.cat(found["y"]), y_TD.detach())
        torch.testing.assert_close(sum(found["router"]), layer.router.weight.grad)
        if replicated:
            torch.testing.assert_close(found["up"][0][:1], up_grad[:1])
            torch.testing.assert_close(found["up"][0][1] + found["up"][1][1], up_grad[1])
        else:
            torch.testing.assert_close(torch.cat(found["up"]), up_grad)
        assert torch.equal(sum(found["dropped"]), layer.expert_stack.log.dropped_E)
        assert torch.equal(sum(found["load"]), layer.load_E)


def test_rank_with_all_pairs_dropped_takes_part() -> None:
    """One pair per expert is kept, all of rank 0, whose weights are larger."""
    ranks = run_distributed(tiny_capacity_on_one_rank, 2)
    assert ranks[0]["sent"] == EXPERTS
    assert ranks[1] == {"sent": 0, "y": 0.0, "grad": 0.0}


def tiny_capacity_on_one_rank() -> dict[str, float]:
    layer = layer_on(2, capacity_factor=0.001)
    layer.router.weight.data = torch.eye(EXPERTS, DIM)
    x_TD = torch.zeros(4, DIM)
    if dist.get_rank() == 0:  # both choices of token t are above all of the zeros
        x_TD[:, :EXPERTS] = 9 * torch.eye(EXPERTS) + 8.9 * torch.eye(EXPERTS).roll(1, 1)
    x_TD.requires_grad_()
    y_TD = layer(x_TD)
    y_TD.sum().backward()
    assert x_TD.grad is not None
    sent = int((layer.load_E - layer.expert_stack.log.dropped_E).sum())
    return {"sent": sent, "y": float(y_TD.abs().sum()), "grad": float(x_TD.grad.abs().sum())}


def top_1(without_tokens: int) -> list[Tensor]:
    """Output and gradients of a rank's part; rank `without_tokens` has no tokens."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(1)
    layer = make_moe(DIM, 12, EXPERTS, 1, groups=make_expert_groups(world), capacity_factor=0.75).double()
    x_TD = batch().double()
    if world > 1 and dist.get_rank() == without_tokens:
        x_TD = x_TD[:0]
    x_TD.requires_grad_()
    y_TD = layer(x_TD)
    y_TD.square().sum().backward()
    return [y_TD.detach(), x_TD.grad, layer.router.weight.grad, world * layer.experts.up.grad]


@pytest.mark.parametrize("without_tokens", [0, 1])
def test_top_1_with_a_capacity_and_a_rank_without_tokens_equals_one_process(without_tokens: int) -> None:
    expected = top_1(without_tokens)
    ranks = run_distributed(top_1, 2, without_tokens)
    for number, of_ranks in enumerate(zip(*ranks, strict=True)):
        found = of_ranks[0] + of_ranks[1] if number == 2 else torch.cat(of_ranks)
        torch.testing.assert_close(found, expected[number], rtol=1e-10, atol=1e-12)
