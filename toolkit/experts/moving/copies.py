"""Copies of a model with sharded experts, such as an EMA or a teacher: experts are matched by id, not by slot."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.compat import copy_without_fsdp, without_compile_prefix
from toolkit.experts.layer.dispatcher import make_dispatcher
from toolkit.experts.layer.routing_log import RoutingLog
from toolkit.experts.layer.rows_in_files import as_in_files
from toolkit.experts.layer.stack import ExpertStack, expert_stacks
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import is_dtensor, whole
from toolkit.experts.placement.placement import contiguous

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def full_copy(model: Model) -> Model:
    """Copy a model with the experts of all ranks, such as a teacher or an EMA. A collective.

    The copy is frozen, computes without communication, and needs the memory of the whole model on each rank. Its
    parameters have the precision of the optimizer's: under mixed precision of FSDP2, call it in
    `accelerator.autocast()`.

    Args:
        model: As prepared, or the model within.

    Returns:
        The copy of the model within.

    Example:
        >>> teacher = experts.full_copy(model).eval()
        >>> optimizer.step()
        >>> experts.ema_update(teacher, model, decay=0.99)
    """
    original = _inner(model)
    copied: Model = copy_without_fsdp(original).requires_grad_(False)
    for name, stack in expert_stacks(copied).items():
        for key, parameter in stack.parameters.items():
            parameter.data = _all_rows(stack, key)
        stack.groups = ExpertGroups()
        stack.dispatcher = make_dispatcher(contiguous(stack.num_experts, 1), stack.groups)
        stack.log, stack.node_of_peer = RoutingLog(stack.num_experts), None
        stack.mark_rows()
        expert_stacks(original)[name].copies.discard(stack)
    return copied


@torch.no_grad()
def ema_update(averaged: nn.Module, model: nn.Module, decay: float = 0.999) -> None:
    """Move the weights of a copy towards the weights of `model`, each expert by its id. A collective.

    A copy with sharded experts takes the placement of `model` first, which may have changed since it was made, by a
    migration or by `load`. Buffers are copied.

    Args:
        averaged: A copy of `model`: from `full_copy`, or from `copy.deepcopy` before or after `prepare`.
        model: As prepared, or the model within.
        decay: Weight of the copy's present weights.

    Raises:
        UserError: The two have other parameters.

    Example:
        >>> ema = copy.deepcopy(accelerator.unwrap_model(model))
        >>> optimizer.step()
        >>> experts.ema_update(ema, model)
    """
    target, source = _inner(averaged), _inner(model)
    goals, origins = dict(target.named_parameters()), dict(source.named_parameters())
    if goals.keys() != origins.keys():
        different = sorted(goals.keys() ^ origins.keys())[0]
        raise UserError(
            f"averaged: parameter {different!r} is in one of the two models only. Give a copy of the model."
        )
    stacks = expert_stacks(source)
    stack_of = {id(p): (stack, key) for stack in stacks.values() for key, p in stack.parameters.items()}
    for name, stack in expert_stacks(target).items():
        if stack.placement.slots_per_rank == stacks[name].placement.slots_per_rank:
            migrate(stack, stacks[name].placement, None)
            for parameter in stacks[name].parameters.values():
                stack_of.pop(id(parameter))  # equal slots
    for name, goal in goals.items():
        new: Tensor = origins[name].detach()
        if id(origins[name]) in stack_of:
            stack, key = stack_of[id(origins[name])]
            new = _all_rows(stack, key)
            new = new if new.shape == goal.shape else as_in_files(new, stack.in_files(key))
        if not is_dtensor(goal):
            new = whole(new)
        if goal.is_floating_point():
            goal.lerp_(new.to(goal.device, goal.dtype), 1 - decay)
        else:
            goal.copy_(new)
    for name, buffer in source.named_buffers():
        target.get_buffer(name).copy_(buffer)


def _inner(model: Model) -> Model:
    """Return the model within DDP, `torch.compile` or `AveragedModel`."""
    children = list(model.named_children())
    if len(children) == 1 and without_compile_prefix(f"{children[0][0]}.") in ("", "module."):
        return _inner(children[0][1])  # type: ignore[return-value]
    return model


def _all_rows(stack: ExpertStack, name: str) -> Tensor:
    """Return the rows (E, ...) of all experts by id, on each rank. A collective of the EP group."""
    placement, parameter = stack.placement, whole(stack.parameters[name].detach())
    rows = parameter.new_zeros(placement.stride, *parameter.shape[1:], device=stack.device)
    rows[: len(parameter)] = parameter.to(stack.device)
    if placement.ranks > 1:
        gathered = rows.new_empty(placement.ranks * placement.stride, *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows, group=stack.groups.ep_group)
        rows = gathered
    return rows[list(placement.owner_slots)].to(parameter.device)
