"""A model with experts on several ranks, saved as ordinary transformers weights that any `from_pretrained` reads."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.hosts.peft.record import describe_adapters, write_records
from toolkit.moe.stack import ExpertStack, expert_stacks


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder, **options)` with the experts of all ranks. A collective.

    A model of PEFT is saved as PEFT does: its adapters, without the base. Rank 0 gathers one tensor at a time and
    writes; it alone needs main memory for all of them. Raises UserError on every rank alike where the folder cannot be
    written.
    """
    inner: Any = getattr(model, "module", model)
    gather = Gatherer(inner)
    saves_base = not hasattr(inner, "peft_config")
    state: dict[str, Tensor] = {}
    kept = dict(inner.named_parameters(remove_duplicate=False))
    for name, value in inner.state_dict().items():
        parameter = kept.get(name, value)
        if saves_base or "modules_to_save" in name or hasattr(parameter, "as_saved") or isinstance(value, DTensor):
            gather(state, name, value, parameter)
        else:  # PEFT leaves out the experts of the base, and takes what every rank has
            state[name] = value
    records = None if saves_base else describe_adapters(inner)
    write_pretrained(inner, folder, state, records, **options)


def write_pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    state: dict[str, Tensor],
    records: dict[str, dict[str, Any]] | None = None,
    **options: Any,
) -> None:
    """Have rank 0 write `state` as the type of `model` does, and `records` of adapters beside it. A collective."""
    failure: list[str | None] = [None]
    if is_first():
        try:
            # Not the instance's own: where the engine has spread experts, that one refuses.
            type(model).save_pretrained(model, folder, state_dict=state, **options)
            if records is not None:
                write_records(folder, records)
        except OSError as error:
            failure = [f"model folder {os.fspath(folder)} cannot be written ({error}): use one that can be."]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise UserError(failure[0])


class Gatherer:
    """Gathers tensors of `model` into a state dict of rank 0, one at a time."""

    def __init__(self, model: nn.Module):
        self._place_of = {
            id(parameter): (stack, parameter)
            for stack in expert_stacks(model).values()
            for parameter in stack.parameters.values()
            if stack.groups.ep_size > 1 or _differs(stack)
        }

    def __call__(self, state: dict[str, Tensor], name: str, value: Tensor, parameter: Tensor) -> None:
        """Put `value`, of `parameter` or of the same rows, under `name`. A collective."""
        whole: Tensor | None = value
        if isinstance(value, DTensor):  # experts under transformers' own expert parallelism, too: in order of ids
            whole = value.full_tensor().cpu()
        elif id(parameter) in self._place_of:
            whole = gather_experts(*self._place_of[id(parameter)])
        if is_first() and whole is not None:
            state[name] = whole


def is_first() -> bool:
    """Whether this process is rank 0, which writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _differs(stack: ExpertStack) -> bool:
    """Whether rows are in another order or shape than in files."""
    reshaped = any(hasattr(parameter, "as_saved") for parameter in stack.parameters.values())
    return reshaped or stack.placement.slots != (tuple(range(stack.num_experts)),)


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
    return parameter.as_saved(whole) if hasattr(parameter, "as_saved") else whole
