"""Router replay after a router update: changed expert choices and KL divergence, by family.

    python benchmarks/speed/router_replay.py           every family of transformers with a top-k router, a minute or two
    python benchmarks/speed/router_replay.py --rehearse  only the toolkit's layers; writes nothing

Small models with random weights in float64, 3 sequences of 10 tokens. Router weights are perturbed by normal noise of
0.3 of their mean absolute value. `flips` is the share of assignments to experts that are not among the recorded experts
of the token. KL is the mean over tokens of the divergence from the output distribution before the perturbation, in
nats, without and with replayed routes. `gradient difference` is the largest relative difference of a parameter's
gradient between the recorded forward pass and its replay with the same weights. Writes
benchmarks/results/router_replay.json; exit code 1 if an assignment flips under replay, or a gradient differs by more
than 1e-6.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from benchmarks.support.families import TINY_EXPERTS, build, moe_families, outputs, supports_float64
from benchmarks.support.precision import in_float64, relative_difference
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.sharding.router_replay import record_routes, replay_routes

DIM, TOP_K = 8, 2


class MoEModel(nn.Module):
    """Two layers of `make_moe` on sequences of ids; `call` calls a layer."""

    def __init__(self, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, DIM)
        layers = [make_moe(DIM, 12, TINY_EXPERTS, TOP_K, seed=i, **options) for i in range(2)]
        for layer in layers:
            nn.init.normal_(layer.router.weight)
        self.layers = nn.ModuleList(layers)
        self.call: Callable[..., Tensor] = lambda layer, x: layer(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + self.call(layer, x)
        return x


ROUTERS = {"softmax": RouterOptions(), "sigmoid": RouterOptions(router_score="sigmoid", balance="bias")}
"""Options of `MoEModel`."""


def make(name: str) -> nn.Module:
    return MoEModel(router=ROUTERS[name]) if name in ROUTERS else build(name)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids) if isinstance(getattr(model, "module", model), MoEModel) else outputs(model, ids)


def tokens(step: int = 0, samples: int = 3) -> Tensor:
    return torch.randint(3, 64, (samples, 10), generator=torch.Generator().manual_seed(step))


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if re.search(r"\.(router|gate)\.", name) and p.ndim > 1]


def perturb(model: nn.Module, by: float = 0.3) -> None:
    """Add noise to router weights, which changes choices."""
    draws = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in router_parameters(model):
            parameter.add_(by * parameter.abs().mean() * torch.randn(parameter.shape, generator=draws))


def kl(p: Tensor, q: Tensor) -> float:
    """Return the KL divergence of logits, averaged over tokens, in nats."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    logits(model, ids).square().mean().backward()
    return taken_gradients(model)


def taken_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients and reset them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def measure(name: str) -> dict[str, Any]:
    model, ids = make(name).eval(), tokens()
    with record_routes(model) as routes:
        recorded = gradients(model, ids)
    with replay_routes(model, routes):
        replayed = gradients(model, ids)
    difference = max(relative_difference(replayed[key], value) for key, value in recorded.items() if value.norm() > 0)
    served = logits(model, ids).detach()
    perturb(model)
    with record_routes(model) as rerouted:
        changed = logits(model, ids)
    with replay_routes(model, routes), record_routes(model) as replay:
        kept = logits(model, ids)
    return {
        "family": {"softmax": "our layers, softmax", "sigmoid": "our layers, sigmoid and groups"}.get(name, name),
        "flips %": round(100 * rerouted.flipped(routes), 1),
        "KL": round(kl(served, changed), 5),
        "flips under replay": replay.flipped(routes),
        "KL under replay": round(kl(served, kept), 5),
        "gradient difference": difference,
    }


def main() -> int:
    from transformers.utils import logging

    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny case; writes nothing")
    arguments = parser.parse_args()
    rows, errors = [], {}
    for name in [*ROUTERS, *([] if arguments.rehearse else sorted(moe_families()))]:
        with in_float64() if name in ROUTERS or supports_float64(name, tokens()) else nullcontext():
            try:
                rows.append(measure(name))
            except UserError as error:
                errors[name] = str(error)
    if arguments.rehearse:
        print(*rows, sep="\n")
        return 0
    ratios = [row["KL"] / row["KL under replay"] for row in rows if row["KL under replay"] > 0]
    write_report(
        "router_replay",
        rows,
        refused=errors,
        families=len(rows) - len(ROUTERS),
        median_flips_percent=round(median(row["flips %"] for row in rows), 1),
        median_kl_ratio=round(median(ratios), 1),
    )
    faithful = all(row["flips under replay"] == 0 and row["gradient difference"] < 1e-6 for row in rows)
    return 0 if faithful else 1


if __name__ == "__main__":
    sys.exit(main())
