"""Splits and removals in the router: tokens stay with the experts that were split from the one they had."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from toolkit.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.dynamic.dynamic_router import DynamicRouter, Hyperplane
from toolkit.errors import UserError
from toolkit.experts.layer.router import TopKRouter
from toolkit.experts.layer.router_options import RouterOptions

DIM, LOGICAL, ACTIVE = 5, 10, 4


def make_router(seed: int, **options: Any) -> DynamicRouter:
    torch.manual_seed(seed)
    router = DynamicRouter(DIM, LOGICAL, 2, RouterOptions(**options), active=ACTIVE)
    router.weight.data[:ACTIVE] = torch.randn(ACTIVE, DIM)
    return router


def families(ids_TK: Tensor, family_of_logical: list[int]) -> Tensor:
    return torch.tensor(family_of_logical)[ids_TK]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), score=st.sampled_from(["softmax", "sigmoid"]), bias=st.booleans())
def test_splits_and_removals_leave_each_token_in_its_families_with_its_weights(
    seed: int, score: str, bias: bool
) -> None:
    draws = random.Random(seed)
    balance = "bias" if bias else "none"
    router = make_router(seed, router_score=score, balance=balance, router_normalize=draws.random() < 0.5)
    x_TD = torch.randn(64, DIM)
    if router.bias is not None:
        router.bias[:ACTIVE] = 0.1 * torch.randn(ACTIVE)
    before = router(x_TD)
    family = list(range(LOGICAL))
    for _ in range(14):
        active = router.active_E.nonzero().flatten().tolist()
        inactive = (~router.active_E).nonzero().flatten().tolist()
        removable = [e for e in active if sum(family[other] == family[e] for other in active) > 1]
        if inactive and (not removable or draws.random() < 0.6):
            new, parent = draws.choice(inactive), draws.choice(active)
            normal_D = torch.randn(DIM)
            router.split(parent, new, Hyperplane(normal_D, float(normal_D @ x_TD[draws.randrange(64)])))
            family[new] = family[parent]
        elif removable:
            router.deactivate(draws.choice(removable))
        after = router(x_TD)
        assert torch.equal(families(after.expert_ids_TK, family), before.expert_ids_TK)
        torch.testing.assert_close(after.weights_TK, before.weights_TK)
        assert router.active_E[after.expert_ids_TK].all()
        assert int(router.num_choices) == int(router.active_E.sum())


def test_a_split_divides_the_tokens_at_the_hyperplane() -> None:
    router = make_router(0)
    router.split(1, 7, Hyperplane(torch.tensor([1.0, 0, 0, 0, 0]), 0.25))
    x_TD = torch.randn(200, DIM)
    allowed_TE = router.allowed_TE(x_TD)
    assert torch.equal(allowed_TE[:, 7], x_TD[:, 0] > 0.25)
    assert torch.equal(allowed_TE[:, 1], x_TD[:, 0] <= 0.25)
    assert allowed_TE[:, [0, 2, 3]].all()
    assert not allowed_TE[:, [4, 5, 6, 8, 9]].any()


def test_with_all_experts_active_it_routes_like_a_plain_router() -> None:
    torch.manual_seed(0)
    dynamic, plain = DynamicRouter(DIM, 6, 2, active=6), TopKRouter(DIM, 6, 2)
    plain.load_state_dict({"weight": dynamic.weight})
    x_TD = torch.randn(50, DIM)
    mine, theirs = dynamic(x_TD), plain(x_TD)
    assert torch.equal(mine.expert_ids_TK, theirs.expert_ids_TK)
    assert torch.equal(mine.weights_TK, theirs.weights_TK)


def test_inactive_experts_get_no_gradient() -> None:
    router = make_router(1)
    routing = router(torch.randn(30, DIM))
    (routing.weights_TK.square().sum() + routing.probs_TE.square().sum()).backward()
    assert router.weight.grad is not None
    assert router.weight.grad[:ACTIVE].abs().sum(1).min() > 0
    assert not router.weight.grad[ACTIVE:].any()


@pytest.mark.parametrize(
    ("experts", "most", "message"),
    [
        (4, 2, "^max_experts=2: is below num_experts=4"),
        (1, 6, "^top_k=2: is not within the active experts. Use 1 to 1"),
    ],
)
def test_a_layer_of_dynamic_experts_names_its_own_arguments(experts: int, most: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_dynamic_moe(DIM, 4, experts, 2, max_experts=most)
