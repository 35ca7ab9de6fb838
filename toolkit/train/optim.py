"""AdamW with the usual parameter groups, and learning-rate schedules.

A schedule is a pure function from a step to a multiplier of the base learning rate. Nothing is stepped and nothing is
saved. (A scheduler prepared by Accelerate steps once per process.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.experts.parallel.ownership import is_owned
from toolkit.run.config.optimizer_options import OptimizerOptions, ScheduleOptions

Schedule = Callable[[int], float]


def build_optimizer(model: nn.Module, *, lr: float, config: OptimizerOptions) -> torch.optim.AdamW:
    """Fused AdamW with weight decay on matrices and none on vectors; owned parameters are in groups of their own.

    Fused, because at small batches memory traffic bounds the step: each tensor is read and written once.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((is_owned(parameter), parameter.ndim >= 2), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": config.weight_decay * decays} for (_, decays), params in groups.items()],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def initial_rates(optimizer: torch.optim.Optimizer, say: Callable[[str], None]) -> list[float]:
    """The learning rate of each parameter group, of which a `Schedule` gives multiples.

    Where a scheduler of torch or transformers was made for the optimizer, its rate by now is that of the scheduler's
    first step, 0 under a warm-up: the rate before counts, and `say` is told so. Raises UserError where all are 0.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        say("notice: the scheduler that was made for the optimizer is not used: rates follow the trainer's `schedule`.")
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    if not any(rates):
        raise UserError("optimizer: the learning rate of every group is 0, nothing would be learned: give it a rate.")
    return rates


def constant(*, warmup_steps: int = 0) -> Schedule:
    """1 after a linear warm-up."""
    return lambda step: min(1.0, (step + 1) / (warmup_steps + 1))


def warmup_cosine(*, max_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """Linear warm-up, then half a cosine from 1 down to `final` at `max_steps` (Loshchilov and Hutter 2017, eq. 5)."""

    def multiplier(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return multiplier


def warmup_stable_decay(*, max_steps: int, warmup_steps: int = 0, decay_steps: int, final: float = 0.0) -> Schedule:
    """Linear warm-up, a plateau at 1, then a straight line down to `final` over the last `decay_steps`."""

    def multiplier(step: int) -> float:
        rise = (step + 1) / (warmup_steps + 1)
        fall = final + (1 - final) * (max_steps - step) / max(1, decay_steps)
        return max(final, min(1.0, rise, fall))

    return multiplier


def warmup_steps(config: ScheduleOptions, steps_per_epoch: int) -> int:
    """The optimizer steps of warm-up."""
    return config.warmup_steps or round(config.warmup_epochs * steps_per_epoch)


def build_schedule(config: ScheduleOptions, *, max_steps: int, steps_per_epoch: int = 0) -> Schedule:
    """The schedule that `config` names, over a run of `max_steps`."""
    rise = warmup_steps(config, steps_per_epoch)
    if config.name == "constant":
        return constant(warmup_steps=rise)
    if config.name == "cosine":
        return warmup_cosine(max_steps=max_steps, warmup_steps=rise, final=config.final)
    decay_steps = config.decay_steps or max(1, max_steps // 5)
    return warmup_stable_decay(max_steps=max_steps, warmup_steps=rise, decay_steps=decay_steps, final=config.final)
