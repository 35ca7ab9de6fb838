"""The state dict of a model whose experts are on several ranks: gathered whole, or refused where it would be a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.experts.layer.stack import ExpertStack, expert_stacks
from toolkit.experts.parallel.collectives import is_main
from toolkit.experts.placement.placement import EMPTY_ROW

_names_are_read = ContextVar("names_are_read", default=False)


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()` on rank 0, with the experts of all ranks in the order of their ids; empty elsewhere.

    A collective. Rank 0 gathers one tensor at a time, in main memory.
    """
    gather, state = Gatherer(model), dict[str, Tensor]()
    for name, value in model.state_dict(keep_vars=True).items():
        gather(state, name, value)
    return state


def is_spread(model: nn.Module) -> bool:
    """Whether this rank has a part of `model` only, or has its experts in another order or shape than in files."""
    return any(map(_is_part, expert_stacks(model).values())) or any(isinstance(p, DTensor) for p in model.parameters())


def refuse_partial_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001
    """To be registered with `register_state_dict_pre_hook` of a module with an `expert_stack`.

    Raises UserError where the experts of this rank, in the order of its slots, would be taken for all of them. Whoever
    passes `keep_vars` asks for the parameters that are here, and gets them.
    """
    if not keep_vars and not _names_are_read.get() and _is_part(vars(module)["expert_stack"]):
        raise UserError(
            "model.state_dict() would have the experts of this rank, in the order of its slots: "
            "call whole_state_dict(model) of toolkit.experts.state.state_dict on every rank."
        )


def take_rows(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """To be registered with `register_load_state_dict_pre_hook` of a module with an `expert_stack`.

    Of experts as files have them, all in order of ids, it takes those of this rank's slots.
    """
    stack: ExpertStack = vars(module)["expert_stack"]
    stacked = {id(parameter) for parameter in stack.parameters.values() if not hasattr(parameter, "as_saved")}
    for name, parameter in module.named_parameters():
        whole = state.get(prefix + name)
        if id(parameter) in stacked and whole is not None and len(whole) == stack.num_experts:
            state[prefix + name] = rows_of(whole, stack.placement.slots[stack.groups.ep_rank])


def rows_of(stacked: Tensor, experts: Sequence[int]) -> Tensor:
    """The rows of `experts`, zeros for an empty slot."""
    index = torch.tensor([max(expert, 0) for expert in experts], dtype=torch.int64, device=stacked.device)
    rows = stacked.index_select(0, index)
    for slot, expert in enumerate(experts):
        if expert == EMPTY_ROW:
            rows[slot].zero_()
    return rows


def read_names(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`call(*args, **kwargs)`, which reads no more of state dicts than names, as PEFT does when it loads adapters."""
    token = _names_are_read.set(True)
    try:
        return call(*args, **kwargs)
    finally:
        _names_are_read.reset(token)


class Gatherer:
    """Gathers tensors of `model` into a state dict of rank 0, one at a time."""

    def __init__(self, model: nn.Module):
        self._place_of = {
            id(parameter): (stack, parameter)
            for stack in expert_stacks(model).values()
            for parameter in stack.parameters.values()
            if _is_part(stack)
        }

    @torch.no_grad()
    def __call__(self, state: dict[str, Tensor], name: str, value: Tensor) -> None:
        """Put `value`, a parameter or buffer, under `name`. A collective."""
        whole: Tensor | None = value.detach()
        if isinstance(value, DTensor):  # experts under transformers' own expert parallelism, too: in order of ids
            whole = value.full_tensor().cpu()
        elif id(value) in self._place_of:
            whole = gather_experts(*self._place_of[id(value)])
        if is_main() and whole is not None:
            state[name] = whole


def _is_part(stack: ExpertStack) -> bool:
    """Whether rows on this rank are not all experts, or in another order or shape than in files."""
    reshaped = any(hasattr(parameter, "as_saved") for parameter in stack.parameters.values())
    return stack.groups.ep_size > 1 or reshaped or stack.placement.slots != (tuple(range(stack.num_experts)),)


@torch.no_grad()
def gather_experts(stack: ExpertStack, parameter: nn.Parameter) -> Tensor | None:
    """(E, ...) by expert id, as in files, in main memory of rank 0; None elsewhere. A collective of its EP group."""
    groups, placement = stack.groups, stack.placement
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
