"""Optimizers with the usual parameter groups, learning-rate schedules, and schedulers of torch or others.

A schedule is a pure function from a step to a multiplier of the base learning rate. Nothing is stepped and nothing is
saved. A scheduler that is passed in its place is stepped and saved by the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.muon import Muon, muon_groups
from toolkit.experts.parallel.ownership import is_owned, ownership_of
from toolkit.integrations.accelerate.compat import steps_once_per_process
from toolkit.run.config.optimizer_options import ScheduleOptions
from toolkit.run.config.run import RunConfig

Schedule = Callable[[int], float]


@runtime_checkable
class Scheduler(Protocol):
    """A scheduler that was made for an optimizer and sets its rates: torch's, transformers', a third party's."""

    def step(self, *args: Any) -> None:
        """Sets the rates of the next step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns all that it counts."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        ...


class SteppedRates:
    """Rates that a scheduler sets: after each optimizer step, or after an evaluation that has its metric.

    Args:
        scheduler: Was made for the recipe's own optimizer, before Accelerate wraps it.
        metric: A metric of an evaluation, such as `eval/loss`, with which the scheduler is stepped; None: it is stepped
            after each optimizer step. `ReduceLROnPlateau` has `eval/loss` if none is given.
    """

    def __init__(self, scheduler: Scheduler, metric: str | None):
        if metric is None and isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            metric = "eval/loss"
        self.scheduler, self.metric = scheduler, metric

    def after_step(self) -> None:
        if self.metric is None:
            self.scheduler.step()

    def after_evaluation(self, metrics: Mapping[str, Any]) -> None:
        if self.metric is not None and self.metric in metrics:
            self.scheduler.step(metrics[self.metric])

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values. Raises UserError for a scheduler that counts something else."""
        return {"scheduler": _plain(self.scheduler.state_dict(), type(self.scheduler).__name__)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. The rates are settings of the optimizer, which is loaded before."""
        self.scheduler.load_state_dict(_of_plain(state["scheduler"]))


def _plain(value: Any, name: str) -> Any:
    """Returns `value` as JSON: mappings as pairs, because JSON makes strings of numbers that are keys."""
    if isinstance(value, Mapping):
        return {"pairs": [[key, _plain(each, name)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(each, name) for each in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    raise UserError(f"scheduler: {name} has a {type(value).__name__}, which checkpoints cannot save. Use another one.")


def _of_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _of_plain(each) for key, each in value["pairs"]}
    return [_of_plain(each) for each in value] if isinstance(value, list) else value


def build_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe: fused AdamW, or Muon with AdamW for what is not a matrix.

    Vectors, also stacked ones of experts, have no weight decay. Expert-parallel parameters are in groups of their own.

    Args:
        model: After its experts are sharded.
        config: The run's config, with the kind of optimizer, weight decay and peak learning rate.

    Example:
        >>> import toolkit as tk, torch
        >>> optimizer = tk.build_optimizer(torch.nn.Linear(4, 3), tk.RunConfig(lr=1e-3))
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.01, 0.0]
    """
    lr, options = config.peak_lr, config.optimizer
    if options.kind == "muon":
        return Muon(muon_groups(model), lr=lr, weight_decay=options.weight_decay)
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        # A stack of experts has one dimension more than the parameter of an expert.
        is_matrix = parameter.ndim >= 2 + (ownership_of(parameter) is not None)
        groups.setdefault((is_owned(parameter), is_matrix), []).append(parameter)
    # Fused: at small batches memory traffic bounds the step, and each tensor is read and written once.
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": options.weight_decay * decays} for (_, decays), params in groups.items()],
        lr=lr,
        fused=True,
    )


def check_optimization(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: object) -> None:
    """Raise UserError for a trainable parameter outside `optimizer`, and a scheduler that Accelerate prepared.

    The parameter would get gradients, which count in the norm, and stay as it is. The scheduler would step once per
    process, so a run that continues with another world size would have other rates.
    """
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in held]
    if left:
        raise UserError(
            f"optimizer: lacks {len(left)} trainable parameter(s) of the model, such as {left[0]!r}. Add them, or "
            "freeze them by requires_grad_(False)."
        )
    if steps_once_per_process(schedule):
        raise UserError(
            "schedule: is prepared by Accelerate, so its rates depend on the world size. Pass the scheduler itself."
        )


def initial_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each parameter group, of which a `Schedule` gives multiples.

    Where a scheduler of torch or transformers was made for the optimizer, its rate by now is that of the scheduler's
    first step, 0 under a warm-up: the rate before counts. Raises UserError if all are 0.
    """
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    if not any(rates):
        raise UserError("optimizer: the learning rate of every group is 0. Give a rate.")
    return rates


def constant(*, warmup_steps: int = 0) -> Schedule:
    """1 after a linear warm-up."""
    return lambda step: min(1.0, (step + 1) / (warmup_steps + 1))


def warmup_cosine(*, max_steps: int, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up, then half a cosine from 1 down to 0 at `max_steps` (Loshchilov and Hutter 2017, eq. 5)."""

    def multiplier(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return multiplier


def warmup_stable_decay(*, max_steps: int, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up, a plateau at 1, then a straight line down to 0 over the last fifth of `max_steps`."""

    def multiplier(step: int) -> float:
        rise = (step + 1) / (warmup_steps + 1)
        fall = (max_steps - step) / max(1, max_steps // 5)
        return max(0.0, min(1.0, rise, fall))

    return multiplier


def warmup_steps(config: ScheduleOptions, steps_per_epoch: int) -> int:
    """The optimizer steps of warm-up."""
    return config.warmup_steps or round(config.warmup_epochs * steps_per_epoch)


def build_schedule(config: ScheduleOptions, *, max_steps: int, steps_per_epoch: int = 0) -> Schedule:
    """The schedule that `config` names, over a run of `max_steps`."""
    rise = warmup_steps(config, steps_per_epoch)
    if config.kind == "constant":
        return constant(warmup_steps=rise)
    make = warmup_cosine if config.kind == "cosine" else warmup_stable_decay
    return make(max_steps=max_steps, warmup_steps=rise)
