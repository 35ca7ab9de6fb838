"""Experts are trained by the optimizer that they were prepared with. One that steps them all the same is refused."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from toolkit.errors import UserError

_numbers = itertools.count()


def train_only_with(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """From now on, a step of any other optimizer that has one of `parameters` raises UserError.

    Trainers make optimizers of their own. A step of such a one would neither copy weights to replicas nor move
    experts, and what it steps with was clipped by the norm of one rank's experts.
    """
    _watch_steps()
    optimizer.prepared_as = next(_numbers)  # type: ignore[attr-defined]
    for parameter in parameters:
        parameter.prepared_as = optimizer.prepared_as  # type: ignore[attr-defined]


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_another)


def _refuse_another(optimizer: Optimizer, *_: Any) -> None:
    number = getattr(optimizer, "prepared_as", None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if getattr(parameter, "prepared_as", number) != number:
                raise UserError(
                    f"optimizer {type(optimizer).__name__} has experts that ExpertParallel prepared with another "
                    "optimizer: step that one; for a Trainer, which makes its own, call expert_trainer with a model "
                    "that was not prepared."
                )
