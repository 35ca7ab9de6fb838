"""The toy that the traps are sprung with: a small mixture in float64, its data, and the loss of one global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn

from tests.support.placements import by_slot
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.experts.layer.grouped_experts import GroupedExperts
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.router import TopKRouter
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.run.config.run import RunConfig
from toolkit.run.run import Run
from toolkit.train.callbacks.base import Callback
from toolkit.train.optim import Schedule, constant
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer

DIM, HIDDEN, EXPERTS, TOP_K, CLASSES, SAMPLES = 6, 10, 4, 2, 3, 8


class ToyMixture(nn.Module):
    """Stem, mixture, head. Expert e starts with the same weights on whichever rank it is."""

    def __init__(self, groups: ExpertGroups, slot_of_expert: tuple[int, ...] = tuple(range(EXPERTS))):
        super().__init__()
        placement = by_slot(slot_of_expert, groups.ep_size)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem = nn.Linear(DIM, DIM)
            router = TopKRouter(DIM, EXPERTS, TOP_K)
            self.head = nn.Linear(DIM, CLASSES)
        experts = GroupedExperts(DIM, HIDDEN, expert_ids=placement.slots[groups.ep_rank])
        stack = ExpertStack({"up": experts.up, "down": experts.down}, placement, groups)
        self.moe = MoE(router, experts, stack)
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
    model = ToyMixture(ExpertGroups())
    inputs, labels = toy_data()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names of the unwrapped model."""
    return {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}


def norm_of(grads: dict[str, Tensor]) -> float:
    return torch.cat([grad.flatten() for grad in grads.values()]).norm().item()


def rows_of(reference: Tensor, groups: ExpertGroups) -> Tensor:
    """The rows of a parameter of all experts that belong to this rank, under the contiguous placement."""
    return reference.chunk(groups.ep_size)[groups.ep_rank]


def spread() -> ExpertGroups:
    """Experts spread over all ranks of this launch."""
    return make_expert_groups(dist.get_world_size() if dist.is_initialized() else 1)


def toy_run(config: RunConfig | None = None) -> Run:
    """A run on the processes of this launch, without a folder: its metrics are kept by nobody."""
    config = config or RunConfig(tracker="none")
    plugin = GradientAccumulationPlugin(num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False)
    return Run("toy", config, Accelerator(gradient_accumulation_plugin=plugin), owns_process_group=False)


def toy_trainer(
    model: nn.Module | None = None,
    *,
    max_steps: int,
    samples: int = SAMPLES,
    batch_size: int = SAMPLES,
    accumulation: int = 1,
    lr: float = 0.01,
    schedule: Schedule | None = None,
    max_grad_norm: float | None = None,
    log_every: int = 1,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Classification of the toy data by `model`, or by a linear layer."""
    run = toy_run(RunConfig(tracker="none", batch_size=batch_size, gradient_accumulation_steps=accumulation))
    model = model or nn.Linear(DIM, CLASSES).double()
    inputs, labels = toy_data(samples)
    batches = TrainBatches(
        TensorTable(input=inputs, label=labels),
        batch_size=batch_size,
        seed=0,
        accumulation=accumulation,
        rank=run.rank,
        world_size=run.world_size,
    )
    return Trainer(
        run,
        Classification(),
        model,
        torch.optim.AdamW(model.parameters(), lr=lr, fused=True),
        batches,
        max_steps=max_steps,
        schedule=schedule or constant(),
        max_grad_norm=max_grad_norm,
        log_every=log_every,
        callbacks=callbacks,
    )
