"""What a module with an expert stack does when its state dict is read or loaded: it gives no part for the whole, and
takes its rows of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.stack import ExpertStack, expert_stacks
from toolkit.experts.placement.placement import EMPTY_ROW


def hook_state(module: nn.Module) -> None:
    """Has `module`, which has an `expert_stack`, refuse to give its rows for all, and take them of all."""
    module.register_state_dict_pre_hook(_refuse_partial_state_dict)
    module.register_load_state_dict_pre_hook(_take_rows)


def _refuse_partial_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001
    """Raises UserError where the experts of this rank, in the order of its slots, would be taken for all of them.

    Whoever passes `keep_vars` asks for the parameters that are here, and gets them.
    """
    stack: ExpertStack = vars(module)["expert_stack"]
    if not keep_vars and not stack.only_names_are_read and stack.is_part:
        raise UserError(
            "model.state_dict() would have the experts of this rank, in the order of its slots: "
            "call whole_state_dict(model) of toolkit.experts.state.state_dict on every rank."
        )


def _take_rows(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes the rows of this rank's slots out of experts as files have them, all in order of ids."""
    stack: ExpertStack = vars(module)["expert_stack"]
    stacked = {id(parameter) for name, parameter in stack.parameters.items() if stack.in_files(name) == "stacked"}
    for name, parameter in module.named_parameters():
        whole = state.get(prefix + name)
        if id(parameter) in stacked and whole is not None and len(whole) == stack.num_experts:
            state[prefix + name] = rows_of(whole, stack.placement.slots[stack.groups.ep_rank])


def rows_of(stacked: Tensor, experts: Sequence[int]) -> Tensor:
    """Returns the rows of `experts`, zeros for an empty slot."""
    index = torch.tensor([max(expert, 0) for expert in experts], dtype=torch.int64, device=stacked.device)
    rows = stacked.index_select(0, index)
    for slot, expert in enumerate(experts):
        if expert == EMPTY_ROW:
            rows[slot].zero_()
    return rows


@contextmanager
def only_names_are_read(model: nn.Module) -> Iterator[None]:
    """Lets state dicts of `model` be made, of which no more than names is read, as PEFT does to load adapters."""
    stacks = list(expert_stacks(model).values())
    for stack in stacks:
        stack.only_names_are_read = True
    try:
        yield
    finally:
        for stack in stacks:
            stack.only_names_are_read = False
