"""Expert capacity, compared with loops over pairs; dropped pairs are not sent and have weight 0."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.processes import run_distributed
from tests.experts.models import make_layer
from toolkit.experts.layer.capacity import within_capacity
from toolkit.experts.layer.moe_layer import MoE

EXPERTS, TOP_K, DIM = 4, 2, 8


def draw_pairs(tokens: int = 23) -> tuple[Tensor, Tensor]:
    """Return expert ids in favour of the first experts, and weights of which many are equal."""
    generator = torch.Generator().manual_seed(0)
    favour = torch.tensor([6.0, 3.0, 1.0, 0.2]).expand(tokens, EXPERTS)
    ids_TK = favour.multinomial(TOP_K, generator=generator)
    return ids_TK, torch.randint(1, 6, ids_TK.shape, generator=generator) / 6


def reference(ids_TK: Tensor, weights_TK: Tensor, factor: float) -> list[list[bool]]:
    limit = math.ceil(factor * ids_TK.numel() / EXPERTS)
    kept = torch.zeros_like(ids_TK, dtype=torch.bool)
    for expert in range(EXPERTS):
        pairs = [(t, k) for t, k in (ids_TK == expert).nonzero().tolist()]
        pairs.sort(key=lambda pair: -weights_TK[pair].item())
        for pair in pairs[:limit]:
            kept[pair] = True
    return kept.tolist()


@pytest.mark.parametrize("factor", [0.1, 0.75, 1.0, 1.5, 100.0])
def test_within_capacity_drops_the_lowest_weights(factor: float) -> None:
    ids_TK, weights_TK = draw_pairs()
    kept_TK = within_capacity(ids_TK, weights_TK, EXPERTS, factor)
    assert kept_TK.tolist() == reference(ids_TK, weights_TK, factor)
    assert bool(kept_TK.all()) == (factor == 100.0)
    assert within_capacity(ids_TK[:0], weights_TK[:0], EXPERTS, factor).shape == (0, TOP_K)


def kept_pairs(first: list[int]) -> dict[float, list[list[bool]]]:
    """Return whether each pair of this rank, whose tokens begin at `first`, is kept, by capacity factor."""
    part = slice(*first[dist.get_rank() : dist.get_rank() + 2])
    ids_TK, weights_TK = draw_pairs()
    return {f: within_capacity(ids_TK[part], weights_TK[part], EXPERTS, f).tolist() for f in (0.5, 1.0)}


@pytest.mark.parametrize("first", [[0, 15, 23], [0, 9, 9, 23]], ids=["2 ranks", "3 ranks, one without tokens"])
def test_within_capacity_over_ranks_drops_the_lowest_weights(first: list[int]) -> None:
    ranks = run_distributed(kept_pairs, len(first) - 1, first)
    for factor in ranks[0]:
        assert [token for rank in ranks for token in rank[factor]] == reference(*draw_pairs(), factor)


SIZES = (DIM, 12, EXPERTS, TOP_K)


def all_experts(layer: MoE, x_TD: Tensor, kept_TK: Tensor) -> Tensor:
    """Return the layer's output with each expert applied to each token, and weight 0 for dropped pairs."""
    routing = layer.router(x_TD)
    up_SFD, down_SFD = layer.experts.up, layer.experts.down
    all_TED = torch.einsum("tef,efd->ted", torch.einsum("td,efd->tef", x_TD, up_SFD).relu(), down_SFD)
    chosen_TKD = all_TED[torch.arange(len(x_TD)).unsqueeze(1), routing.expert_ids_TK]
    return ((routing.weights_TK * kept_TK).unsqueeze(-1) * chosen_TKD).sum(1)


def gradients(layer: MoE, y_TD: Tensor, x_TD: Tensor) -> list[Tensor]:
    wanted = [x_TD, layer.router.weight, layer.experts.up, layer.experts.down]
    return list(torch.autograd.grad(y_TD.square().sum(), wanted))


def test_layer_with_dropped_pairs_computes_the_kept_pairs() -> None:
    layer = make_layer(*SIZES, capacity_factor=0.75).double()
    x_TD = torch.randn(30, DIM, dtype=torch.float64, requires_grad=True)
    routing = layer.router(x_TD)
    kept_TK = torch.tensor(reference(routing.expert_ids_TK, routing.weights_TK, 0.75))
    expected = all_experts(layer, x_TD, kept_TK)
    y_TD = layer(x_TD)
    torch.testing.assert_close(y_TD, expected)
    torch.testing.assert_close(gradients(layer, y_TD, x_TD), gradients(layer, expected, x_TD))
    routed_E = routing.expert_ids_TK.flatten().bincount(minlength=EXPERTS)
    assert layer.load_E.tolist() == layer.last_load_E.tolist() == routed_E.tolist()
    dropped_E = layer.expert_stack.log.last.dropped_E
    assert dropped_E.tolist() == (routed_E - 12).clamp(min=0).tolist()  # ceil(0.75 * 60 / 4) = 12
    assert 0 < dropped_E.sum() == (~kept_TK).sum()


def test_evaluation_drops_and_counts_nothing() -> None:
    layer, x_TD = make_layer(*SIZES, capacity_factor=0.5).eval(), torch.randn(30, DIM)
    torch.testing.assert_close(layer(x_TD), make_layer(*SIZES)(x_TD))
    assert layer.expert_stack.log.last.dropped_E is None


def tiny_capacity() -> dict[str, float]:
    layer = make_layer(*SIZES, capacity_factor=0.001).double()
    layer.router.weight.data = torch.eye(EXPERTS, DIM).double()
    x_TD = torch.zeros(4, DIM).double()
    if dist.get_rank() == 0:  # both choices of token t are above all zeros
        x_TD[:, :EXPERTS] = 9 * torch.eye(EXPERTS) + 8.9 * torch.eye(EXPERTS).roll(1, 1)
    x_TD.requires_grad_()
    y_TD = layer(x_TD)
    y_TD.sum().backward()
    sent = int((layer.load_E - layer.expert_stack.log.last.dropped_E).sum())
    return {"sent": sent, "y": float(y_TD.abs().sum()), "grad": float(x_TD.grad.abs().sum())}


def test_rank_with_all_pairs_dropped_takes_part() -> None:
    """One pair per expert is kept, all of rank 0, whose weights are larger."""
    first, second = run_distributed(tiny_capacity, 2)
    assert first["sent"] == EXPERTS
    assert second == {"sent": 0, "y": 0.0, "grad": 0.0}
