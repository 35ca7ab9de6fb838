"""Experts are trained by the optimizer that they were prepared with, with the state of their own rows.

Another optimizer that steps them, and the state of another rank's experts, are refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from toolkit.errors import UserError
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.parallel.optimizer_rows import fit_states, has_stepped
from toolkit.experts.parallel.ownership import is_owned, ownership_of


def fit_optimizer(optimizer: Optimizer, stacks: Mapping[str, ExpertStack]) -> None:
    """Cut the states of `optimizer` as the experts of `stacks`. Raises UserError for one that has stepped, and for one
    of other parameters than the model's, which would train nothing."""
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
            fit_states(optimizer, parameter, stack.num_experts)


def step_by_only(optimizer: Optimizer | None, parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Have a step of any other optimizer that has one of `parameters` raise UserError; returns what ends that. None:
    of any optimizer, if ranks have different ones.

    Trainers make optimizers of their own. A step of such a one would neither copy weights to replicas nor move
    experts, and what it steps with was clipped by the norm of one rank's experts. Afterwards a step of any optimizer
    that has owned ones of them raises UserError: nothing averages their gradients then.
    """
    _watch_steps()
    listed = list(parameters)

    def allow(of_owned: Callable[[], Optimizer | None], of_others: Callable[[], Optimizer | None] | None) -> None:
        for parameter in listed:
            ownership = ownership_of(parameter)
            assert ownership is not None
            ownership.optimizer = of_owned if is_owned(parameter) else of_others

    end = functools.partial(allow, _nobodys, None)
    if optimizer is None:
        end()
    else:
        prepared = weakref.ref(optimizer)
        allow(prepared, prepared)
    return end


def _nobodys() -> None:
    """Stands for an optimizer that is none: of an owned parameter whose gradients nobody averages any more."""


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_another)


def _refuse_another(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ownership = ownership_of(parameter)
            if ownership is not None and ownership.optimizer is not None and ownership.optimizer() is not optimizer:
                raise UserError(
                    f"optimizer {type(optimizer).__name__} has experts that ExpertParallel prepared with another "
                    "optimizer, with none, or until it was closed: step that one, before close; for a Trainer, which "
                    "makes its own, call expert_trainer with a model that was not prepared."
                )


def load_only_own_states(optimizer: Optimizer, stacks: Mapping[str, ExpertStack]) -> list[RemovableHandle]:
    """Have `optimizer.load_state_dict` raise UserError for the state of other experts than this rank's.

    A checkpoint of `optimizer.state_dict()` has those of the rank that wrote it, whose shapes are the same. What this
    rank has kept itself, to undo steps, it may load until experts move. Returns the hooks.
    """

    def say_whose(_: Optimizer, state: dict[str, Any]) -> None:
        if (places := _places(stacks)) is not None:
            state["experts"] = places

    def compare(_: Optimizer, state: dict[str, Any]) -> None:
        if state["state"] and state.get("experts") != _places(stacks):
            raise UserError(
                "this state of the optimizer is not that of the experts on this rank, because optimizer.state_dict() "
                "has those of one rank only: use the save(folder) and load(folder) of ExpertParallel."
            )

    return [
        optimizer.register_state_dict_post_hook(say_whose),
        optimizer.register_load_state_dict_pre_hook(compare),
    ]


def _places(stacks: Mapping[str, ExpertStack]) -> dict[str, Any] | None:
    """Return the place of this rank and the slots of all ranks by layer, in plain values; None where this rank has all
    experts in order of their ids, as a model has them that was not prepared."""
    slots = {name: [list(row) for row in stack.placement.slots] for name, stack in stacks.items()}
    if all(slots[name] == [list(range(stack.num_experts))] for name, stack in stacks.items()):
        return None
    return {"ep_rank": next(iter(stacks.values())).groups.ep_rank, "slots": slots}
