"""What `ExpertParallel.prepare` is given: which is the model, which its optimizer, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.compat import is_marked_as_prepared
from toolkit.errors import UserError
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.parallel.optimizer_rows import fit_states, has_stepped


def model_and_optimizer(objects: Iterable[Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The first model and the first optimizer of `objects`. Raises UserError where one is missing, or was prepared
    before."""
    given = list(objects)
    models = [each for each in given if isinstance(each, nn.Module)]
    optimizers = [each for each in given if isinstance(each, torch.optim.Optimizer)]
    if not models or not optimizers:
        raise UserError(
            f"prepare got {', '.join(type(each).__name__ for each in given) or 'nothing'}: "
            "give it a model and its optimizer, and what else Accelerate prepares."
        )
    was_prepared = isinstance(models[0], DistributedDataParallel) or is_marked_as_prepared(models[0])
    if was_prepared or isinstance(optimizers[0], AcceleratedOptimizer):
        raise UserError(
            "accelerator.prepare or prepare_model was called with this model or optimizer before: call "
            "ExpertParallel's prepare instead, once, and evaluate what it returns."
        )
    return models[0], optimizers[0]


def refuse_schedulers(accelerator: Accelerator, objects: Iterable[Any]) -> None:
    """Raise UserError for a scheduler where Accelerate would have it take as many steps per optimizer step as there are
    processes."""
    multiplied = accelerator.step_scheduler_with_optimizer and not accelerator.split_batches
    for other in objects:
        if isinstance(other, torch.optim.lr_scheduler.LRScheduler) and multiplied and accelerator.num_processes > 1:
            raise UserError(
                f"{type(other).__name__}, once prepared, takes {accelerator.num_processes} steps per optimizer "
                "step: count its length in optimizer steps, leave it out of prepare, and call scheduler.step() "
                "after optimizer.step() where accelerator.sync_gradients is True."
            )


def fit_optimizer(optimizer: torch.optim.Optimizer, stacks: Mapping[str, ExpertStack]) -> None:
    """Cut its states as the experts of `stacks`. Raises UserError for one that has stepped, and for one of other
    parameters than the model's, which would train nothing."""
    if has_stepped(optimizer):
        raise UserError("optimizer has stepped before prepare: prepare first, so that its rows follow the experts.")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, stack in stacks.items():
        for key, parameter in stack.parameters.items():
            if parameter.requires_grad and id(parameter) not in trained:
                raise UserError(
                    f"optimizer does not hold parameter {key!r} of the experts at {name!r}: "
                    "make it from model.parameters()."
                )
            fit_states(optimizer, parameter)
