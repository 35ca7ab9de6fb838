"""Routers: scores, choices and weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.router import Routing, TopKRouter
from toolkit.experts.layer.router_options import RouterOptions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_under_autocast_and_for_tokens_of_half_precision(dtype: torch.dtype) -> None:
    router, x_TD = TopKRouter(16, 8, 2), torch.randn(32, 16).to(dtype)
    expected = x_TD.float() @ router.weight.T
    with torch.autocast("cpu", dtype):
        routing = router(x_TD)
    assert {routing.logits_TE.dtype, routing.probs_TE.dtype, routing.weights_TK.dtype} == {torch.float32}
    torch.testing.assert_close(routing.logits_TE, expected)


@pytest.mark.parametrize("top_k", [0, 7])
def test_more_choices_than_experts_or_none_are_refused(top_k: int) -> None:
    with pytest.raises(UserError, match=f"top_k={top_k}: take 1 to 6, the number of experts"):
        TopKRouter(4, 6, top_k)


def plain_reference(router: TopKRouter, x_TD: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Experts and weights by loops over tokens and experts, in the words of the papers."""
    options, ids, weights = router.options, [], []
    for logits in (x_TD.double() @ router.weight.double().T).tolist():
        if options.router_score == "softmax":
            total = sum(math.exp(logit) for logit in logits)
            scores = [math.exp(logit) / total for logit in logits]
        else:
            scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        bias = [0.0] * len(scores) if router.bias is None else router.bias.tolist()
        ranked = [score + b for score, b in zip(scores, bias, strict=True)]
        chosen = sorted(range(len(scores)), key=ranked.__getitem__, reverse=True)[: router.top_k]
        total = sum(scores[e] for e in chosen) if options.router_normalize else 1.0
        ids.append(chosen)
        weights.append([options.routed_scaling * scores[e] / total for e in chosen])
    return ids, weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"router_normalize": False, "routed_scaling": 16.0},
        {"router_score": "sigmoid", "routed_scaling": 2.5},
        {"router_score": "sigmoid", "router_normalize": False, "balance": "bias"},
        {"balance": "bias"},
    ],
)
def test_choices_and_weights_are_those_of_a_loop_over_tokens(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    router, x_TD = TopKRouter(6, 12, 3, RouterOptions(**options)), torch.randn(40, 6)
    router.weight.data.normal_()
    if router.bias is not None:
        router.bias.normal_(std=0.3)
    ids, weights = plain_reference(router, x_TD)
    routing = router(x_TD)
    assert routing.expert_ids_TK.tolist() == ids
    torch.testing.assert_close(routing.weights_TK, torch.tensor(weights), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(routing.probs_TE.sum(-1), torch.ones(40))


def sorted_by_expert(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    order = ids_TK.argsort(-1)
    return ids_TK.gather(-1, order), weights_TK.gather(-1, order)


def assert_same_routing(routing: Routing, ids_TK: Tensor, weights_TK: Tensor) -> None:
    ours, theirs = (
        sorted_by_expert(*pair) for pair in [(routing.expert_ids_TK, routing.weights_TK), (ids_TK, weights_TK)]
    )
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])


def test_it_routes_as_the_deepseek_v3_of_transformers_does() -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = theirs.DeepseekV3Config(
        hidden_size=16, n_routed_experts=32, num_experts_per_tok=4, n_group=1, topk_group=1, routed_scaling_factor=2.5
    )
    router = theirs.DeepseekV3TopkRouter(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_(std=0.2)
    options = RouterOptions(router_score="sigmoid", routed_scaling=2.5, balance="bias")
    ours, x_TD = TopKRouter(16, 32, 4, options), torch.randn(64, 16)
    ours.weight.data, ours.bias = router.weight.data, router.e_score_correction_bias
    _, weights_TK, ids_TK = router(x_TD)
    assert_same_routing(ours(x_TD), ids_TK, weights_TK)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_moe, not normalised"])
def test_it_routes_as_the_softmax_families_of_transformers_do(family: str) -> None:
    from transformers.models.mixtral import modeling_mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    normalize = not family.endswith("not normalised")
    if family == "mixtral":
        config = modeling_mixtral.MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2)
        router = modeling_mixtral.MixtralTopKRouter(config)
    else:
        config = modeling_qwen3_moe.Qwen3MoeConfig(
            hidden_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=normalize
        )
        router = modeling_qwen3_moe.Qwen3MoeTopKRouter(config)
    router.weight.data.normal_()
    ours, x_TD = TopKRouter(16, 8, 2, RouterOptions(router_normalize=normalize)), torch.randn(64, 16)
    ours.weight.data = router.weight.data
    _, weights_TK, ids_TK = router(x_TD)
    assert_same_routing(ours(x_TD), ids_TK, weights_TK)


def test_a_subclass_chooses_experts_by_its_own_method() -> None:
    class Last(TopKRouter):
        def choose(self, scores_TE: Tensor) -> Tensor:
            return super().choose(-scores_TE)

    torch.manual_seed(0)
    layer, x_TD = make_moe(6, 4, 5, 2, router_type=Last), torch.randn(9, 6)
    layer.router.weight.data.normal_()
    layer(x_TD)
    expected = layer.router.scores(x_TD)[1].topk(2, largest=False).indices
    assert torch.equal(layer.routing.expert_ids_TK, expected)
