"""The optimizers of the comparison with one process, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.optimizers import ScheduleFreeSGD
from toolkit.experts.muon import Muon, muon_groups


class DecayedSGD(torch.optim.SGD):
    """SGD whose state is Python numbers, as in many optimizers outside torch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    state["rate"] = state.get("rate", group["lr"]) * 0.7
                    assert (type(state["step"]), type(state["rate"])) == (int, float), "also after a resume"
                    p.sub_(p.grad, alpha=state["rate"] / state["step"])


def lion(groups: Any) -> Optimizer:
    from lion_pytorch import Lion

    return Lion(groups, lr=5e-3, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1),
    "AMSGrad, fused": lambda groups: torch.optim.Adam(groups, lr=0.02, amsgrad=True, fused=True),
    "Nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=5e-3, momentum=0.5, centered=True, eps=1e-4),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "Lion": lion,
    "Muon": lambda groups: Muon(groups, lr=0.02),
    "schedule-free": lambda groups: ScheduleFreeSGD(groups, lr=0.1),
    "decayed SGD": lambda groups: DecayedSGD(groups, lr=0.1),
}


def make_optimizer(name: str, model: nn.Module, *, groups: bool) -> Optimizer:
    """Make an optimizer of the trained parameters of `model`.

    With `groups`, experts have a group of their own, with another learning rate and weight decay.
    """
    if name == "Muon":
        return OPTIMIZERS[name](muon_groups(model))
    trained = {parameter: key for key, parameter in model.named_parameters() if parameter.requires_grad}
    rows = [p for p, key in trained.items() if groups and ".experts." in key]
    optimizer = OPTIMIZERS[name]([p for p in trained if not any(p is row for row in rows)])
    if rows:
        defaults = optimizer.defaults
        changed = {"lr": 2 * defaults["lr"]} | ({"weight_decay": 0.3} if "weight_decay" in defaults else {})
        optimizer.add_param_group({"params": rows, **changed})
    return optimizer
