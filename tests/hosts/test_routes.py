"""Recorded routes are replayed: no choice is made anew, and gradients are those of the recorded forward."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.equality import in_float64, relative_difference
from tests.hosts.transformers.mixtures import build, outputs
from toolkit.config.router import RouterOptions
from toolkit.errors import UserError
from toolkit.hosts.routes import record_routes, replay_routes
from toolkit.moe.layer import make_moe
from toolkit.moe.routes import Routes

DIM, EXPERTS, TOP_K = 8, 6, 2


class Ours(nn.Module):
    """Two of our layers on sequences of ids."""

    def __init__(self, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, DIM)
        self.layers = nn.ModuleList(make_moe(DIM, 12, EXPERTS, TOP_K, seed=i, **options) for i in range(2))
        for layer in self.layers:
            nn.init.normal_(layer.router.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


ROUTERS = {
    "softmax": RouterOptions(),
    "sigmoid": RouterOptions(router_score="sigmoid", router_groups=3, top_k_groups=2, balance="bias"),
}
"""Those of our layers that are tried."""
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "dbrx", "gemma4_text", "glm4_moe")
"""Softmax after and before the choice, sigmoid with a bias and groups, weights at the input, fused tables, and
routers that are not beside the experts."""


def make(name: str) -> nn.Module:
    return Ours(router=ROUTERS[name]) if name in ROUTERS else build(name)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids) if isinstance(getattr(model, "module", model), Ours) else outputs(model, ids)


def tokens(step: int = 0, samples: int = 3) -> Tensor:
    return torch.randint(3, 64, (samples, 10), generator=torch.Generator().manual_seed(step))


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if re.search(r"\.(router|gate)\.", name) and p.ndim > 1]


def perturb(model: nn.Module, by: float = 0.3) -> None:
    """Router weights that are some updates away, so that they choose otherwise."""
    draws = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in router_parameters(model):
            parameter += by * parameter.abs().mean() * torch.randn(parameter.shape, generator=draws)


def kl(of: Tensor, to: Tensor) -> float:
    """Mean over tokens, in nats."""
    log_p, log_q = of.log_softmax(-1), to.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    logits(model, ids).square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", [*ROUTERS, *FAMILIES])
def test_replay_keeps_the_choices_of_other_weights_and_trains_the_router(name: str) -> None:
    with in_float64():
        model, ids = make(name), tokens()
        with record_routes(model) as routes:
            expected = gradients(model, ids)
        with replay_routes(model, routes):
            found = gradients(model, ids)
        assert all(torch.equal(found[key], expected[key]) for key in expected)

        served = logits(model, ids).detach()
        perturb(model)
        with record_routes(model) as chosen:
            anew = logits(model, ids)
        with replay_routes(model, routes), record_routes(model) as again:
            replayed = logits(model, ids)
            replayed.square().mean().backward()
        assert chosen.flipped(routes) > 0
        assert again.flipped(routes) == 0
        assert kl(served, replayed) < kl(served, anew)
        assert all(p.grad is not None and p.grad.norm() > 0 for p in router_parameters(model))
