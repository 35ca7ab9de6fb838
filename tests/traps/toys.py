"""The toy that the traps are sprung with: a small mixture in float64, its data, and the loss of one global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from toolkit.config import RunConfig
from toolkit.moe.dispatch import AllToAllDispatcher, LocalDispatcher
from toolkit.moe.experts import GroupedExperts
from toolkit.moe.layer import MoE
from toolkit.moe.placement import ExpertPlacement
from toolkit.moe.router import TopKRouter
from toolkit.parallel import ShardGroups, make_shard_groups
from toolkit.run import Run

DIM, HIDDEN, EXPERTS, TOP_K, CLASSES, SAMPLES = 6, 10, 4, 2, 3, 8


class ToyMixture(nn.Module):
    """Stem, mixture, head. The expert with id e starts with the same weights wherever it lives."""

    def __init__(self, groups: ShardGroups, slot_of_expert: tuple[int, ...] = tuple(range(EXPERTS))):
        super().__init__()
        placement = ExpertPlacement(slot_of_expert, groups.ep_size)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem = nn.Linear(DIM, DIM)
            router = TopKRouter(DIM, EXPERTS, TOP_K)
            self.head = nn.Linear(DIM, CLASSES)
        experts = GroupedExperts(DIM, HIDDEN, expert_ids=placement.experts_on(groups.ep_rank), groups=groups)
        slots = torch.tensor(slot_of_expert)
        dispatcher = LocalDispatcher(EXPERTS) if groups.ep_size == 1 else AllToAllDispatcher(slots, groups)
        self.moe = MoE(router, experts, dispatcher, placement)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.stem(x).relu()))


def toy_data(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, DIM, generator=draws, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (samples,), generator=draws)


def my_mean_loss(model: nn.Module) -> Tensor:
    """The mean cross-entropy over this rank's equal share of the global batch: what a plain loop writes."""
    inputs, labels = (column.chunk(dist.get_world_size())[dist.get_rank()] for column in toy_data())
    return nn.functional.cross_entropy(model(inputs), labels)


def reference_gradients() -> dict[str, Tensor]:
    """What one process computes from the whole global batch, with all experts at hand."""
    model = ToyMixture(ShardGroups())
    inputs, labels = toy_data()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names of the unwrapped model."""
    return {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}


def norm_of(grads: dict[str, Tensor]) -> float:
    return torch.cat([grad.flatten() for grad in grads.values()]).norm().item()


def rows_of(reference: Tensor, groups: ShardGroups) -> Tensor:
    """The rows of a parameter of all experts that belong to this rank, under the contiguous placement."""
    return reference.chunk(groups.ep_size)[groups.ep_rank]


def spread() -> ShardGroups:
    """Experts spread over all ranks of this launch."""
    return make_shard_groups(dist.get_world_size())


def toy_run(run_dir: Path | None = None, **config: Any) -> Run:
    """A run on the processes of this launch, its metrics kept by nobody."""
    return Run("toy", RunConfig(run_dir=run_dir, tracker="none", **config), Accelerator())
