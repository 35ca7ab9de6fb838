"""Routers and router losses, compared with loops over tokens, formulas, and the routers of transformers."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from tests.experts.models import make_layer
from toolkit.errors import UserError
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.router import TopKRouter
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel import collectives


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_under_autocast_and_for_half_precision_tokens(dtype: torch.dtype) -> None:
    router, x_TD = TopKRouter(16, 8, 2), torch.randn(32, 16).to(dtype)
    expected = x_TD.float() @ router.weight.T
    with torch.autocast("cpu", dtype):
        routing = router(x_TD)
    assert {routing.logits_TE.dtype, routing.probs_TE.dtype, routing.weights_TK.dtype} == {torch.float32}
    torch.testing.assert_close(routing.logits_TE, expected)


@pytest.mark.parametrize("top_k", [0, 7])
def test_invalid_top_k_raises(top_k: int) -> None:
    with pytest.raises(UserError, match=f"top_k={top_k}: take 1 to 6, the number of experts"):
        TopKRouter(4, 6, top_k)


def reference(router: TopKRouter, x_TD: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Return experts and weights by loops over tokens and experts."""
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
def test_choices_and_weights_equal_a_loop_over_tokens(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    router, x_TD = TopKRouter(6, 12, 3, RouterOptions(**options)), torch.randn(40, 6)
    router.weight.data.normal_()
    if router.bias is not None:
        router.bias.normal_(std=0.3)
    ids, weights = reference(router, x_TD)
    routing = router(x_TD)
    assert routing.expert_ids_TK.tolist() == ids
    torch.testing.assert_close(routing.weights_TK, torch.tensor(weights), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(routing.probs_TE.sum(-1), torch.ones(40))


def transformers_router(family: str) -> tuple[Any, RouterOptions]:
    """Return a transformers router of 16 units and 8 experts with 2 per token, and the equivalent options."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    sizes = {"hidden_size": 16, "num_experts_per_tok": 2}
    if family == "deepseek_v3":
        groups = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
        router = deepseek.DeepseekV3TopkRouter(deepseek.DeepseekV3Config(n_routed_experts=8, **sizes, **groups))
        return router, RouterOptions(router_score="sigmoid", routed_scaling=2.5, balance="bias")
    if family == "mixtral":
        return mixtral.MixtralTopKRouter(mixtral.MixtralConfig(num_local_experts=8, **sizes)), RouterOptions()
    normalize = family == "qwen3_moe, normalized"
    config = qwen.Qwen3MoeConfig(num_experts=8, norm_topk_prob=normalize, **sizes)
    return qwen.Qwen3MoeTopKRouter(config), RouterOptions(router_normalize=normalize)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_moe, normalized", "qwen3_moe"])
def test_choices_and_weights_equal_transformers(family: str) -> None:
    expected, options = transformers_router(family)
    router, x_TD = TopKRouter(16, 8, 2, options), torch.randn(64, 16)
    router.weight.data = expected.weight.data.normal_()
    if router.bias is not None:
        router.bias = expected.e_score_correction_bias.normal_(std=0.2)
    _, weights_TK, ids_TK = expected(x_TD)
    routing = router(x_TD)
    order, found_order = ids_TK.argsort(-1), routing.expert_ids_TK.argsort(-1)
    assert torch.equal(routing.expert_ids_TK.gather(-1, found_order), ids_TK.gather(-1, order))
    torch.testing.assert_close(routing.weights_TK.gather(-1, found_order), weights_TK.gather(-1, order))


def test_subclass_can_override_choose() -> None:
    class Lowest(TopKRouter):
        def choose(self, scores_TE: Tensor) -> Tensor:
            return super().choose(-scores_TE)

    torch.manual_seed(0)
    layer, x_TD = make_moe(6, 4, 5, 2, router_type=Lowest), torch.randn(9, 6)
    layer.router.weight.data.normal_()
    layer(x_TD)
    expected = layer.router.scores(x_TD)[1].topk(2, largest=False).indices
    assert torch.equal(layer.routing.expert_ids_TK, expected)


EXPERTS, TOP_K, DIM = 6, 2, 8
WEIGHTS = {"balance_weight": 0.3, "z_weight": 0.02}
X = torch.randn(6, 5, DIM, generator=torch.Generator().manual_seed(4))
FIRST = {1: [0, 6], 2: [0, 2, 6], 3: [0, 2, 2, 6]}
"""World size -> first sequence of each rank; one of three ranks has none."""


def formula(layer: MoE, balance_weight: float, z_weight: float) -> Tensor:
    """Return the penalty of the tokens `X`: balance loss E * sum_e f_e * P_e, and z-loss."""
    logits = X.flatten(0, 1) @ layer.router.weight.T
    experts = logits.shape[1]
    probs = logits.softmax(-1)
    if layer.router.options.router_score == "sigmoid":
        probs = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    ids = logits.topk(TOP_K).indices
    fraction = torch.stack([(ids == expert).float().mean() for expert in range(experts)])
    z_loss = logits.exp().sum(-1).log().square().mean()
    return balance_weight * experts * (fraction * probs.mean(0)).sum() + z_weight * z_loss


def share_and_gradient(score: str) -> tuple[Tensor, Tensor]:
    rank, world = collectives.rank(), collectives.world_size()
    layer = make_layer(DIM, 4, EXPERTS, TOP_K, router=RouterOptions(router_score=score))
    layer(X[slice(*FIRST[world][rank : rank + 2])])
    share = RouterPenalty(layer, **WEIGHTS).share()
    share.backward()
    return share.detach(), layer.router.weight.grad


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_router_penalty_and_its_gradient_equal_the_formula(world: int, score: str) -> None:
    layer = make_layer(DIM, 4, EXPERTS, TOP_K, router=RouterOptions(router_score=score))
    expected = formula(layer, **WEIGHTS)
    (gradient,) = torch.autograd.grad(expected, layer.router.weight)
    shares, gradients = zip(*run_distributed(share_and_gradient, world, score), strict=True)
    torch.testing.assert_close(sum(shares), expected.detach())
    torch.testing.assert_close(sum(gradients), gradient)


class TwoLayers(nn.Module):
    """Layers with different numbers of experts, each of which a forward pass may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(DIM, 4, experts, TOP_K) for experts in (EXPERTS - 2, EXPERTS))

    def forward(self, x: Tensor, active: Sequence[int] = (0, 1)) -> Tensor:
        return x + sum(self.layers[number](x) for number in active)


def test_router_penalty_omits_skipped_layers() -> None:
    model = TwoLayers()
    penalty = RouterPenalty(model, **WEIGHTS)
    for active in ((0, 1), (0,), (1,), (0, 1), ()):
        model.zero_grad()
        model(X, active)
        share = penalty()
        (share + X.sum().requires_grad_()).backward()
        assert [n for n, layer in enumerate(model.layers) if layer.router.weight.grad is not None] == list(active)
        if active:
            expected = sum(formula(model.layers[number], **WEIGHTS) for number in active) / 2
            torch.testing.assert_close(share.detach(), expected.detach())


def test_router_penalty_read_twice_is_equal_and_differentiable() -> None:
    model = TwoLayers()
    penalty = RouterPenalty(model, balance_weight=1.0)
    model(X)
    first, second = penalty(), penalty()
    assert first.requires_grad
    second.backward()
    assert float(first.detach()) == float(second.detach()) == float(penalty())
