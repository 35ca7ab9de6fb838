"""The optimizer of sharded experts: the states that it was made with are cut to this rank's rows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.parallel.optimizer_rows import unwrapped


def fit_optimizer(optimizer: Optimizer, stacks: Mapping[str, ExpertStack]) -> None:
    """Cut the states that `optimizer` was made with to the rows of `stacks`."""
    for stack in stacks.values():
        for parameter in stack.parameters.values():
            size = stack.num_experts * parameter.shape[1:].numel()
            state = unwrapped(optimizer).state.get(parameter, {})
            for key, value in state.items():
                is_made = isinstance(value, Tensor) and value.ndim
                if is_made and (value.shape[1:] == parameter.shape[1:] or value.numel() == size):
                    state[key] = value.flatten()[:1].expand(parameter.shape).clone()
