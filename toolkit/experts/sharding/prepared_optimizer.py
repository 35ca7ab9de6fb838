"""The optimizer of sharded experts: its states are cut to this rank's rows, and it loads no other rank's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from toolkit.errors import UserError
from toolkit.experts.layer.stack import ExpertStack, as_in_files
from toolkit.experts.parallel.optimizer_rows import unwrapped


def fit_optimizer(optimizer: Optimizer, stacks: Mapping[str, ExpertStack]) -> None:
    """Cut the states that `optimizer` was made with to the rows of `stacks`.

    Raises:
        UserError: The optimizer lacks a trainable parameter of the experts.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, stack in stacks.items():
        for key, parameter in stack.parameters.items():
            if parameter.requires_grad and id(parameter) not in trained:
                raise UserError(
                    f"optimizer: parameter {key!r} of the experts at {name!r} is missing. "
                    "Make the optimizer from model.parameters()."
                )
            whole = torch.empty(stack.num_experts, *parameter.shape[1:], device="meta")
            fit_states(optimizer, parameter, as_in_files(whole, stack.in_files(key)).shape)


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether there is more state than an optimizer can have when it is made: tensors of one number, as Adagrad's."""
    values = (value for state in unwrapped(optimizer).state.values() for value in state.values())
    return any(isinstance(v, Tensor) and bool((v != v.flatten()[:1]).any()) for v in values)


def fit_states(optimizer: Optimizer, parameter: nn.Parameter, shape: torch.Size) -> None:
    """Resize the initial optimizer states of `parameter`, which had `shape`, to its current rows."""
    state = unwrapped(optimizer).state.get(parameter, {})
    for key, value in state.items():
        if (
            isinstance(value, Tensor)
            and value.ndim
            and (value.shape[1:] == parameter.shape[1:] or value.shape == shape)
        ):
            state[key] = value.flatten()[:1].expand(parameter.shape).clone()


def load_only_own_states(optimizer: Optimizer, stacks: Mapping[str, ExpertStack]) -> list[RemovableHandle]:
    """Have `optimizer.load_state_dict` raise UserError for states of other experts than this rank's.

    A checkpoint of `optimizer.state_dict()` has the states of the rank that wrote it, in the same shapes.

    Returns:
        The hooks.
    """

    def note_rows(_: Optimizer, state: dict[str, Any]) -> None:
        if (places := _places(stacks)) is not None:
            state["experts"] = places

    def compare(_: Optimizer, state: dict[str, Any]) -> None:
        if state["state"] and state.get("experts") != _places(stacks):
            raise UserError(
                "optimizer: this state is of other experts than this rank has. "
                "Use the save(folder) and load(folder) of ExpertParallel instead of optimizer.state_dict()."
            )

    return [
        optimizer.register_state_dict_post_hook(note_rows),
        optimizer.register_load_state_dict_pre_hook(compare),
    ]


def _places(stacks: Mapping[str, ExpertStack]) -> dict[str, Any] | None:
    """Return this rank and the slots of all ranks by layer, in plain values; None if this rank has all experts in order
    of their ids."""
    slots = {name: [list(row) for row in stack.placement.slots] for name, stack in stacks.items()}
    if all(slots[name] == [list(range(stack.num_experts))] for name, stack in stacks.items()):
        return None
    return {"ep_rank": next(iter(stacks.values())).groups.ep_rank, "slots": slots}
