"""A small MoE model in float64, its data, the loss of a global batch, and a trainer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn

import toolkit as tk
from tests.support.placements import by_slot
from toolkit.data.batches import TrainBatches
from toolkit.experts.layer.grouped_experts import GroupedExperts
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.router import TopKRouter
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.train.optim import constant

DIM, HIDDEN, EXPERTS, TOP_K, CLASSES, SAMPLES = 6, 10, 4, 2, 3, 8


class ToyMoE(nn.Module):
    """Stem, MoE layer and head. The initial weights of an expert do not depend on its rank."""

    def __init__(self, groups: ExpertGroups, slot_of_expert: tuple[int, ...] = tuple(range(EXPERTS))):
        super().__init__()
        placement = by_slot(slot_of_expert, groups.ep_size)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem = nn.Linear(DIM, DIM)
            router = TopKRouter(DIM, EXPERTS, TOP_K)
            self.head = nn.Linear(DIM, CLASSES)
        experts = GroupedExperts(DIM, HIDDEN, expert_ids=placement.slots[groups.ep_rank])
        self.moe = MoE(router, experts, ExpertStack({"up": experts.up, "down": experts.down}, placement, groups))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.stem(x).relu()))


def toy_data(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, DIM, generator=draws, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (samples,), generator=draws)


def local_loss(model: nn.Module) -> Tensor:
    """Return the mean loss over this rank's share of the global batch."""
    inputs, labels = (column.chunk(dist.get_world_size())[dist.get_rank()] for column in toy_data())
    return nn.functional.cross_entropy(model(inputs), labels)


def reference_gradients() -> dict[str, Tensor]:
    """Return the gradients of the global batch in one process with all experts."""
    model = ToyMoE(ExpertGroups())
    inputs, labels = toy_data()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients by the names of the unwrapped model."""
    return {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}


def expert_groups() -> ExpertGroups:
    """Return one EP group of all ranks."""
    return make_expert_groups(dist.get_world_size() if dist.is_initialized() else 1)


def toy_run(config: tk.RunConfig | None = None) -> tk.Run:
    """Return a run without a folder on the processes of this launch."""
    config = config or tk.RunConfig(tracker="none")
    plugin = GradientAccumulationPlugin(num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False)
    return tk.Run("toy", config, Accelerator(cpu=True, gradient_accumulation_plugin=plugin), owns_process_group=False)


def toy_trainer(
    model: nn.Module | None = None,
    *,
    max_steps: int,
    samples: int = SAMPLES,
    batch_size: int = SAMPLES,
    accumulation: int = 1,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    lr: float = 0.01,
    **settings: Any,
) -> tk.Trainer:
    """Return a trainer that classifies the toy data with `model`, or with a linear layer."""
    run = toy_run(tk.RunConfig(tracker="none", batch_size=batch_size, gradient_accumulation_steps=accumulation))
    model = model or nn.Linear(DIM, CLASSES).double()
    inputs, labels = toy_data(samples)
    batches = TrainBatches(
        tk.TensorTable(input=inputs, label=labels),
        batch_size=batch_size,
        seed=0,
        accumulation=accumulation,
        rank=run.rank,
        world_size=run.world_size,
    )
    optimizer = (make_optimizer or (lambda m: torch.optim.AdamW(m.parameters(), lr=lr, fused=True)))(model)
    settings = {"schedule": constant(), "log_every": 1} | settings
    return tk.Trainer(run, tk.Classification(), model, optimizer, batches, max_steps=max_steps, **settings)
