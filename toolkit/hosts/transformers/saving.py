"""A model with experts on several ranks, saved as ordinary transformers weights that any `from_pretrained` reads."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.moe.stack import ExpertStack, expert_stacks


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder, **options)` with the experts of all ranks. A collective.

    Rank 0 gathers one tensor at a time and writes; it alone needs main memory for the whole model. Raises UserError on
    every rank alike where the folder cannot be written.
    """
    inner: Any = getattr(model, "module", model)
    stacks = [stack for stack in expert_stacks(inner).values() if stack.groups.ep_size > 1 or _differs(stack)]
    place_of = {id(p): (stack, p) for stack in stacks for p in stack.parameters.values()}
    state: dict[str, Tensor] = {}
    rank = dist.get_rank() if dist.is_initialized() else 0
    kept = dict(inner.named_parameters(remove_duplicate=False))
    for name, value in inner.state_dict().items():
        if isinstance(value, DTensor):  # experts under transformers' own expert parallelism, too: in order of ids
            value = value.full_tensor().cpu()
        elif id(kept.get(name)) in place_of:
            value = gather_experts(*place_of[id(kept[name])])
        if rank == 0 and value is not None:
            state[name] = value
    failure: list[str | None] = [None]
    if rank == 0:
        try:
            # Not the instance's own: where the engine has spread experts, that one refuses.
            type(inner).save_pretrained(inner, folder, state_dict=state, **options)
        except OSError as error:
            failure = [f"model folder {os.fspath(folder)} cannot be written ({error}): use one that can be."]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise UserError(failure[0])


def _differs(stack: ExpertStack) -> bool:
    """Whether rows are in another order or shape than in files."""
    fused = any(hasattr(parameter, "fused_rows") for parameter in stack.parameters.values())
    return fused or stack.placement.slots != (tuple(range(stack.num_experts)),)


@torch.no_grad()
def gather_experts(stack: ExpertStack, parameter: nn.Parameter) -> Tensor | None:
    """(E, ...) by expert id, as in files, in main memory of rank 0; None elsewhere. A collective of its EP group."""
    groups, placement = stack.groups, stack.placement
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank >= groups.ep_size:
        return None
    owned = [
        [(slot, expert) for slot, expert in enumerate(row) if expert >= 0 and placement.owner(expert) == (peer, slot)]
        for peer, row in enumerate(placement.slots)
    ]
    here = [slot for slot, _ in owned[rank]]
    rows = parameter.detach().index_select(0, torch.tensor(here, dtype=torch.int64, device=parameter.device))
    if rank > 0:
        if here:
            dist.send(rows, group=groups.ep_group, group_dst=0)
        return None
    whole = torch.empty(placement.num_experts, *parameter.shape[1:], dtype=parameter.dtype)
    for peer, held in enumerate(owned):
        if peer > 0 and held:
            rows = parameter.new_empty(len(held), *parameter.shape[1:])
            dist.recv(rows, group=groups.ep_group, group_src=peer)
        if held:
            whole[[expert for _, expert in held]] = rows.cpu()
    return whole.flatten(0, 1) if hasattr(parameter, "fused_rows") else whole
