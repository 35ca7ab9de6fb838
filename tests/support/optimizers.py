"""Small versions of optimizers from packages that are not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Weights are beta * x + (1 - beta) * z in training and x in evaluation (Defazio et al. 2024, arXiv 2405.15682)."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, beta: float = 0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0, "trains": False})

    def train(self) -> None:
        self._switch(trains=True)

    def eval(self) -> None:
        self._switch(trains=False)

    @torch.no_grad()
    def _switch(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"] if trains else 1 - 1 / group["beta"])
                group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() before a step")
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    x = p.lerp(z, 1 - 1 / group["beta"])
                    z.sub_(p.grad, alpha=group["lr"])
                    p.copy_(x.lerp_(z, 1 / group["steps"]).lerp_(z, 1 - group["beta"]))


class GrowingRates(torch.optim.Optimizer):
    """SGD with a growing learning rate factor in the parameter group, as in Prodigy."""

    def __init__(self, parameters: Iterable[Tensor], lr: float):
        super().__init__(parameters, {"lr": lr, "d": 1.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1 + 1 / group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * group["d"])
