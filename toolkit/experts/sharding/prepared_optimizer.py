"""The optimizer of sharded experts: the states that it was made with are cut to this rank's rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit.experts.layer.stack import ExpertStack, as_in_files
from toolkit.experts.parallel.optimizer_rows import unwrapped


def fit_optimizer(optimizer: Optimizer, stacks: Mapping[str, ExpertStack]) -> None:
    """Cut the states that `optimizer` was made with to the rows of `stacks`."""
    for stack in stacks.values():
        for name, parameter in stack.parameters.items():
            whole = torch.empty(stack.num_experts, *parameter.shape[1:], device="meta")
            shape = as_in_files(whole, stack.in_files(name)).shape
            state = unwrapped(optimizer).state.get(parameter, {})
            for key, value in state.items():
                is_made = isinstance(value, Tensor) and value.ndim
                if is_made and (value.shape[1:] == parameter.shape[1:] or value.shape == shape):
                    state[key] = value.flatten()[:1].expand(parameter.shape).clone()


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether there is more state than an optimizer can have when it is made: tensors of one number, as Adagrad's."""
    values = (value for state in unwrapped(optimizer).state.values() for value in state.values())
    return any(isinstance(v, Tensor) and bool((v != v.flatten()[:1]).any()) for v in values)
