"""Experts that were split take turns: together they get what the one got, whoever ends first."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from toolkit.moe.lifecycle.router import DynamicRouter
from toolkit.moe.router import TopKRouter

DIM, LOGICAL, ACTIVE = 5, 10, 4


def make_router(seed: int, **options: object) -> DynamicRouter:
    torch.manual_seed(seed)
    router = DynamicRouter(DIM, LOGICAL, 2, active=ACTIVE, **options)
    router.weight.data[:ACTIVE] = torch.randn(ACTIVE, DIM)
    return router


def families(ids_TK: Tensor, family_of_logical: list[int]) -> Tensor:
    return torch.tensor(family_of_logical)[ids_TK]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), score=st.sampled_from(["softmax", "sigmoid"]), bias=st.booleans())
def test_however_experts_are_split_and_end_a_token_keeps_its_families_and_weights(
    seed: int, score: str, bias: bool
) -> None:
    draws = random.Random(seed)
    router = make_router(seed, score=score, bias_balancing=bias, normalize=draws.random() < 0.5)
    x_TD = torch.randn(64, DIM)
    if router.bias is not None:
        router.bias[:ACTIVE] = 0.1 * torch.randn(ACTIVE)
    before = router(x_TD)
    family = list(range(LOGICAL))
    for _ in range(14):
        active = router.active_E.nonzero().flatten().tolist()
        vacant = (~router.active_E).nonzero().flatten().tolist()
        ends = [logical_id for logical_id in active if sum(family[other] == family[logical_id] for other in active) > 1]
        if vacant and (not ends or draws.random() < 0.6):
            logical_id, beside = draws.choice(vacant), draws.choice(active)
            router.logical_id(logical_id, beside=beside)
            direction_D = torch.randn(DIM)
            router.divide(logical_id, beside, direction_D, float(direction_D @ x_TD[draws.randrange(64)]))
            family[logical_id] = family[beside]
        elif ends:
            router.vacate(draws.choice(ends))
        after = router(x_TD)
        assert torch.equal(families(after.expert_ids_TK, family), before.expert_ids_TK)
        torch.testing.assert_close(after.weights_TK, before.weights_TK)
        assert router.active_E[after.expert_ids_TK].all()
        assert int(router.num_choices) == int(router.active_E.sum())


def test_a_split_gives_each_half_its_side() -> None:
    router = make_router(0)
    direction_D = torch.tensor([1.0, 0, 0, 0, 0])
    router.logical_id(7, beside=1)
    router.divide(7, 1, direction_D, 0.25)
    x_TD = torch.randn(200, DIM)
    open_TE = router.open_TE(x_TD)
    assert torch.equal(open_TE[:, 7], x_TD[:, 0] > 0.25)
    assert torch.equal(open_TE[:, 1], x_TD[:, 0] <= 0.25)
    assert open_TE[:, [0, 2, 3]].all()
    assert not open_TE[:, [4, 5, 6, 8, 9]].any()


def test_with_all_seats_taken_it_routes_like_a_plain_router() -> None:
    torch.manual_seed(0)
    seated, plain = DynamicRouter(DIM, 6, 2, active=6), TopKRouter(DIM, 6, 2)
    plain.load_state_dict({"weight": seated.weight})
    x_TD = torch.randn(50, DIM)
    mine, theirs = seated(x_TD), plain(x_TD)
    assert torch.equal(mine.expert_ids_TK, theirs.expert_ids_TK)
    assert torch.equal(mine.weights_TK, theirs.weights_TK)


def test_vacant_seats_get_no_gradient() -> None:
    router = make_router(1)
    routing = router(torch.randn(30, DIM))
    (routing.weights_TK.square().sum() + routing.probs_TE.square().sum()).backward()
    assert router.weight.grad is not None
    assert router.weight.grad[:ACTIVE].abs().sum(1).min() > 0
    assert not router.weight.grad[ACTIVE:].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active": 1}, "living=1 must lie between top_k=2"),
        ({"active": 4, "force_balanced": True}, "cannot be force_balanced"),
        ({"active": 4, "expert_groups": 2, "top_k_groups": 2}, "no expert_groups"),
    ],
)
def test_options_that_make_no_sense_with_vacant_seats_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicRouter(DIM, 6, 2, **options)
