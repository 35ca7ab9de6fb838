"""What the router decides."""

from __future__ import annotations

import pytest
import torch

from toolkit.moe.router import TopKRouter


def router_with(weight: list[list[float]], top_k: int, bias: list[float] | None = None) -> TopKRouter:
    router = TopKRouter(len(weight[0]), len(weight), top_k, bias_balancing=bias is not None)
    router.weight.data.copy_(torch.tensor(weight))
    if bias is not None:
        assert router.bias is not None
        router.bias.copy_(torch.tensor(bias))
    return router


def test_the_best_experts_are_kept_and_their_probabilities_add_up_to_one() -> None:
    # Logits log 1, log 2, log 5 give probabilities 1/8, 2/8, 5/8; the two best are renormalised to 5/7 and 2/7.
    router = router_with(torch.tensor([[1.0], [2.0], [5.0]]).log().tolist(), top_k=2)
    routing = router(torch.ones(1, 1))
    assert routing.expert_ids_TK.tolist() == [[2, 1]]
    torch.testing.assert_close(routing.probs_TE, torch.tensor([[1 / 8, 2 / 8, 5 / 8]]))
    torch.testing.assert_close(routing.weights_TK, torch.tensor([[5 / 7, 2 / 7]]))


def test_a_bias_chooses_experts_and_leaves_their_weights_alone() -> None:
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log().tolist()
    routing = router_with(weight, top_k=2, bias=[10.0, 0.0, 0.0])(torch.ones(1, 1))
    assert routing.expert_ids_TK.tolist() == [[0, 2]]
    torch.testing.assert_close(routing.weights_TK, torch.tensor([[1 / 6, 5 / 6]]))


def test_a_bias_of_zero_changes_nothing() -> None:
    x_TD, plain = torch.randn(16, 4), TopKRouter(4, 6, 2)
    biased = router_with(plain.weight.tolist(), top_k=2, bias=[0.0] * 6)
    one, other = plain(x_TD), biased(x_TD)
    assert torch.equal(one.expert_ids_TK, other.expert_ids_TK)
    torch.testing.assert_close(one.weights_TK, other.weights_TK)


@pytest.mark.parametrize("bias_balancing", [False, True])
def test_gradients_reach_the_tokens_and_the_router_through_the_weights(bias_balancing: bool) -> None:
    router = TopKRouter(4, 6, 2, bias_balancing=bias_balancing).double()
    x_TD = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    # Steps of the numerical check are 1e-6: no token of this seed lies that close to another choice.
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(router, {"weight": w}, (x,)).weights_TK, (x_TD, router.weight)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_under_autocast_and_for_tokens_of_half_precision(dtype: torch.dtype) -> None:
    router, x_TD = TopKRouter(16, 8, 2), torch.randn(32, 16).to(dtype)
    expected = x_TD.float() @ router.weight.T
    with torch.autocast("cpu", dtype):
        routing = router(x_TD)
    assert {routing.logits_TE.dtype, routing.probs_TE.dtype, routing.weights_TK.dtype} == {torch.float32}
    torch.testing.assert_close(routing.logits_TE, expected)


def test_no_tokens_are_routed_nowhere() -> None:
    routing = TopKRouter(4, 6, 2)(torch.empty(0, 4))
    assert routing.expert_ids_TK.shape == routing.weights_TK.shape == (0, 2)
    assert routing.probs_TE.shape == (0, 6)


def test_with_one_expert_per_token_the_weight_is_one() -> None:
    routing = TopKRouter(4, 6, 1)(torch.randn(8, 4))
    assert torch.equal(routing.weights_TK, torch.ones(8, 1))


@pytest.mark.parametrize("top_k", [0, 7])
def test_more_choices_than_experts_or_none_are_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k={top_k} must lie between 1 and num_experts=6"):
        TopKRouter(4, 6, top_k)
