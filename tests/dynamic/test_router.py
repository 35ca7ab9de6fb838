"""Splits and removals in the router."""

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


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), score=st.sampled_from(["softmax", "sigmoid"]), bias=st.booleans())
def test_splits_and_removals_keep_the_family_and_weights_of_tokens(seed, score, bias):
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
        assert torch.equal(torch.tensor(family)[after.expert_ids_TK], before.expert_ids_TK)
        torch.testing.assert_close(after.weights_TK, before.weights_TK)
        assert router.active_E[after.expert_ids_TK].all()
        assert int(router.num_choices) == int(router.active_E.sum())


def test_split_and_deactivate_divide_the_tokens_at_the_hyperplanes():
    router = make_router(0)
    x_TD = torch.randn(400, DIM)
    a, b, c, d = (x_TD[:, axis] > offset for axis, offset in enumerate((0.25, -0.5, 0.1, 0.4)))

    def plane(axis: int, offset: float) -> Hyperplane:
        return Hyperplane(torch.eye(DIM)[axis], offset)

    def assert_allowed(**tokens_of: Tensor) -> None:
        every = torch.ones(len(x_TD), dtype=torch.bool)
        expected = {"e1": every, "e2": every, "e3": every} | tokens_of
        columns = [expected.get(f"e{expert}", ~every) for expert in range(LOGICAL)]
        assert torch.equal(router.allowed_TE(x_TD), torch.stack(columns, 1))

    router.split(0, 4, plane(0, 0.25))
    router.split(4, 5, plane(1, -0.5))
    router.split(4, 6, plane(2, 0.1))
    router.split(0, 7, plane(3, 0.4))
    assert_allowed(e0=~a & ~d, e4=a & ~b & ~c, e5=a & b, e6=a & ~b & c, e7=~a & d)
    assert [router.children_of(expert) for expert in (0, 4)] == [[4, 7], [5, 6]]
    heir = router.weight[6].clone()
    router.deactivate(4)
    assert_allowed(e0=~a & ~d, e5=a & b, e6=a & ~b, e7=~a & d)
    assert [router.children_of(expert) for expert in (0, 4, 6)] == [[6, 7], [], [5]]
    assert torch.equal(router.weight[6], heir)
    assert not router.weight[4].any()
    router.split(5, 4, plane(2, 0.1))
    assert_allowed(e0=~a & ~d, e4=a & b & c, e5=a & b & ~c, e6=a & ~b, e7=~a & d)
    router.deactivate(6)  # in favour of expert 5
    assert_allowed(e0=~a & ~d, e4=a & c, e5=a & ~c, e7=~a & d)
    router.deactivate(7)  # in favour of its parent
    assert_allowed(e0=~a, e4=a & c, e5=a & ~c)


def test_router_with_all_experts_active_equals_top_k_router():
    torch.manual_seed(0)
    dynamic, plain = DynamicRouter(DIM, 6, 2, active=6), TopKRouter(DIM, 6, 2)
    plain.load_state_dict({"weight": dynamic.weight})
    x_TD = torch.randn(50, DIM)
    found, expected = dynamic(x_TD), plain(x_TD)
    assert torch.equal(found.expert_ids_TK, expected.expert_ids_TK)
    assert torch.equal(found.weights_TK, expected.weights_TK)


def test_inactive_experts_get_no_gradient():
    router = make_router(1)
    routing = router(torch.randn(30, DIM))
    (routing.weights_TK.square().sum() + routing.probs_TE.square().sum()).backward()
    assert router.weight.grad is not None
    assert router.weight.grad[:ACTIVE].abs().sum(1).min() > 0
    assert not router.weight.grad[ACTIVE:].any()


@pytest.mark.parametrize(
    ("experts", "max_experts", "message"),
    [
        (4, 2, "^max_experts=2: is below num_experts=4"),
        (1, 6, "^top_k=2: is not within the active experts. Use 1 to 1"),
    ],
)
def test_make_dynamic_moe_invalid_argument_raises(experts, max_experts, message):
    with pytest.raises(UserError, match=message):
        make_dynamic_moe(DIM, 4, experts, 2, max_experts=max_experts)
