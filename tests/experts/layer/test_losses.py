"""Router losses against their formulas, written as loops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.helpers import run_distributed
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.groups import make_expert_groups

EXPERTS, TOP_K, LENGTH, DIM = 6, 2, 5, 8


def balance(ids_TK: Tensor, probs_TE: Tensor) -> float:
    """E * sum_e f_e * P_e of the tokens given."""
    copies = ids_TK.flatten().tolist()
    return EXPERTS * sum(copies.count(e) / len(copies) * float(probs_TE[:, e].mean()) for e in range(EXPERTS))


def tokens(rank: int, world: int) -> Tensor:
    """Rank's part of 6 sequences, cut unevenly: one rank has none where there are three."""
    first = [0, 2, 6] if world == 2 else [0, 2, 2, 6] if world == 3 else [0, 6]
    x = torch.randn(6, LENGTH, DIM, generator=torch.Generator().manual_seed(4))
    return x[first[rank] : first[rank + 1]]


def layer_on(world: int, score: str = "softmax") -> MoE:
    torch.manual_seed(1)
    layer = make_moe(DIM, 4, EXPERTS, TOP_K, groups=make_expert_groups(world), router=RouterOptions(router_score=score))
    torch.nn.init.normal_(layer.router.weight)
    return layer


def penalty_on_one_rank(score: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's share, the gradient that the router gets from it, and its routing."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    layer = layer_on(world, score)
    layer(tokens(dist.get_rank() if world > 1 else 0, world))
    share = RouterPenalty(layer, balance_weight=1.0)()
    assert share is not None
    assert layer.routing is not None
    share.backward()
    grad = layer.router.weight.grad
    assert grad is not None
    return share.detach(), grad, layer.routing.expert_ids_TK, layer.routing.probs_TE.detach()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_loss_on_one_process_equals_its_formula(score: str) -> None:
    share, _, ids_TK, probs_TE = penalty_on_one_rank(score)
    assert float(share) == pytest.approx(balance(ids_TK, probs_TE), rel=1e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_balance_loss_and_its_gradient_on_any_number_of_ranks_equal_one_process(world: int) -> None:
    ranks, alone = run_distributed(penalty_on_one_rank, world, "softmax"), penalty_on_one_rank("softmax")
    torch.testing.assert_close(sum(rank[0] for rank in ranks), alone[0])
    torch.testing.assert_close(sum(rank[1] for rank in ranks), alone[1])


def test_the_z_loss_is_the_mean_square_of_the_logarithm_of_the_sum() -> None:
    layer = layer_on(1)
    layer(tokens(0, 1))
    assert layer.routing is not None
    expected = [float(logits.exp().sum().log()) ** 2 for logits in layer.routing.logits_TE.detach().double()]
    share = RouterPenalty(layer, balance_weight=0.0, z_weight=2.0)()
    assert share is not None
    assert float(share.detach()) == pytest.approx(2 * sum(expected) / len(expected), rel=1e-6)


class LayersThatMayBeSkipped(nn.Module):
    """The first layer has fewer experts than the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(make_moe(DIM, 4, experts, TOP_K) for experts in (EXPERTS - 2, EXPERTS))

    def forward(self, x: Tensor, run: Sequence[int] = (0, 1)) -> Tensor:
        for number in run:
            x = x + self.layers[number](x)
        return x


def share_of(penalty: RouterPenalty) -> Tensor:
    share = penalty()
    assert share is not None
    return share


def test_layers_may_have_different_numbers_of_experts() -> None:
    model = LayersThatMayBeSkipped()
    model(tokens(0, 1))
    both = share_of(RouterPenalty(model, balance_weight=1.0, z_weight=0.1))
    each = [share_of(RouterPenalty(layer, balance_weight=1.0, z_weight=0.1)) for layer in model.layers]
    assert float(both.detach()) == pytest.approx(float(sum(share.detach() for share in each)) / 2, rel=1e-6)


def test_a_layer_that_a_forward_skips_is_left_out() -> None:
    model = LayersThatMayBeSkipped()
    penalty = RouterPenalty(model, balance_weight=1.0)
    x = tokens(0, 1)
    for run in ((0, 1), (0,), (1,), (0, 1), ()):
        model.zero_grad()
        model(x, run)
        share = share_of(penalty)
        (share + x.sum().requires_grad_()).backward()
        got = [number for number, layer in enumerate(model.layers) if layer.router.weight.grad is not None]
        assert got == list(run)
        if run:
            each = [float(share_of(RouterPenalty(model.layers[number], balance_weight=1.0)).detach()) for number in run]
            assert float(share.detach()) == pytest.approx(sum(each) / 2, rel=1e-6)


def test_a_penalty_that_is_read_again_is_the_same() -> None:
    model = LayersThatMayBeSkipped()
    penalty = RouterPenalty(model, balance_weight=1.0)
    model(tokens(0, 1))
    first, second = share_of(penalty), share_of(penalty)
    assert first.requires_grad
    assert second.requires_grad
    second.backward()
    assert float(first.detach()) == float(second.detach()) == float(share_of(penalty))
