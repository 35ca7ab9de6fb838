"""Gathers the state dict of a model with sharded experts on rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.experts.layer.rows_in_files import as_in_files
from toolkit.experts.layer.stack import ExpertStack, expert_stacks
from toolkit.experts.parallel.collectives import is_main, meet
from toolkit.experts.parallel.ownership import is_dtensor, whole


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()` on rank 0, with the experts of all ranks in the order of their ids; empty elsewhere.

    A collective. Rank 0 gathers one tensor at a time, in main memory.
    """
    meet("whole_state_dict")
    gather, state = Gatherer(model), dict[str, Tensor]()
    for name, value in model.state_dict(keep_vars=True).items():
        gather(state, name, value)
    return state


def is_sharded(model: nn.Module) -> bool:
    """Whether this rank has only a part of `model`, or its experts in another order or shape than files have them."""
    return any(stack.is_part for stack in expert_stacks(model).values()) or any(
        is_dtensor(p) for p in model.parameters()
    )


class Gatherer:
    """Gathers tensors of `model` into a state dict of rank 0, one at a time."""

    def __init__(self, model: nn.Module):
        self._place_of = {
            id(parameter): (stack, name)
            for stack in expert_stacks(model).values()
            for name, parameter in stack.parameters.items()
            if stack.is_part
        }

    def size_of(self, value: Tensor) -> int:
        """Return the bytes of `value` when it is whole, the same on every rank."""
        if id(value) not in self._place_of:
            return value.numel() * value.element_size()
        stack, _ = self._place_of[id(value)]
        return stack.placement.num_experts * value.shape[1:].numel() * value.element_size()

    @torch.no_grad()
    def __call__(self, state: dict[str, Tensor], name: str, value: Tensor) -> None:
        """Put `value`, a parameter or buffer, under `name`. A collective."""
        gathered: Tensor | None = value.detach()
        if id(value) in self._place_of:
            gathered = gather_experts(*self._place_of[id(value)])
        elif is_dtensor(value):
            gathered = whole(value).cpu()
        if is_main() and gathered is not None:
            state[name] = gathered


@torch.no_grad()
def gather_experts(stack: ExpertStack, name: str) -> Tensor | None:
    """(E, ...) by expert id, as in files, in main memory of rank 0; None elsewhere. A collective of its EP group."""
    groups, placement, parameter = stack.groups, stack.placement, whole(stack.parameters[name])
    if not groups.is_in_first_group:
        return None
    rank = groups.ep_rank
    owned = [
        [(slot, expert) for slot, expert in enumerate(row) if expert >= 0 and placement.owner(expert) == (peer, slot)]
        for peer, row in enumerate(placement.slots)
    ]
    here = [slot for slot, _ in owned[rank]]
    rows = parameter.detach().index_select(0, torch.tensor(here, dtype=torch.int64, device=parameter.device))
    if rank > 0:
        if here:
            dist.send(rows.to(stack.device), group=groups.ep_group, group_dst=0)
        return None
    of_all = torch.empty(placement.num_experts, *parameter.shape[1:], dtype=parameter.dtype)
    for peer, held in enumerate(owned):
        if peer > 0 and held:
            rows = parameter.new_empty(len(held), *parameter.shape[1:], device=stack.device)
            dist.recv(rows, group=groups.ep_group, group_src=peer)
        if held:
            of_all[[expert for _, expert in held]] = rows.cpu()
    return as_in_files(of_all, stack.in_files(name))
