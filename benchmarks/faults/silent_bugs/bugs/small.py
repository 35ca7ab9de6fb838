"""Small models, batches and checkpoint functions of the scripts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.state import checkpoint_files

SIZE = 12
"""Samples of a global batch."""


def begin() -> tuple[Accelerator, bool]:
    """Set the seed; return an accelerator and whether the bug is enabled, without the argument `corrected`."""
    set_seed(seed())
    return Accelerator(), "corrected" not in sys.argv[1:]


def seed() -> int:
    """Return the numeric argument, or 0: the seed of weights and data."""
    return next((int(word) for word in sys.argv[1:] if word.isdecimal()), 0)


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


class MoEModel(nn.Module):
    """Model with a sharded MoE layer of four experts, top 2."""

    recompute = False
    """Use activation checkpointing for the MoE layer."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.moe = make_moe(16, 12, 4, 2, groups=make_expert_groups(world))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x).relu()
        moe = functools.partial(checkpointed, self.moe, use_reentrant=False) if self.recompute else self.moe
        return self.head(hidden + moe(hidden))


def saving(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Return functions that save and load an MoE model with all experts."""

    def save(folder: str) -> None:
        checkpoint_files.save(folder, model, optimizer)

    def load(folder: str) -> None:
        checkpoint_files.load(folder, model, optimizer)

    return save, load


class SumOverRanks(torch.autograd.Function):
    """Differentiable sum over ranks."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def sum_over_ranks(value: Tensor) -> Tensor:
    return SumOverRanks.apply(value) if dist.is_initialized() else value


def gather_with_gradient(part: Tensor, accelerator: Accelerator) -> Tensor:
    """Concatenate the parts of all ranks, with gradient."""
    full = part.new_zeros(accelerator.num_processes, *part.shape)
    return sum_over_ranks(full.index_copy(0, torch.tensor([accelerator.process_index]), part[None])).flatten(0, 1)


@dataclass
class Output:
    logits: Tensor
    aux_loss: Tensor


class Routed(nn.Module):
    """MoE layer with four replicated experts and dense routing."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 3))

    def mix(self, weights: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("be,bi,eij->bj", weights, x, self.experts)


def balance_loss(probabilities: Tensor, accelerator: Accelerator) -> Tensor:
    """Return the load-balancing loss over the samples of all ranks."""
    load = nn.functional.one_hot(probabilities.argmax(-1), 4).float().sum(0)
    samples = len(probabilities) * accelerator.num_processes
    return 4 * (sum_over_ranks(load) * sum_over_ranks(probabilities.sum(0))).sum() / samples**2


def batch(step: int, accelerator: Accelerator, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the global batch: inputs (B, 8) and classes (B,)."""
    draws = torch.Generator().manual_seed(step + 100 * seed())
    x, y = torch.randn(size, 8, generator=draws), torch.randint(3, (size,), generator=draws)
    part = size // accelerator.num_processes
    rows = slice(accelerator.process_index * part, (accelerator.process_index + 1) * part)
    return x[rows], y[rows]
