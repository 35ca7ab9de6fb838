"""A small run in which experts are split, merged and pruned, on any number of ranks: what the tests here train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import toolkit as tk
from tests.support.orders import TaskAfterTask
from toolkit.data.batches import Augment, EvalBatches, TrainBatches
from toolkit.data.replay_memory import ReplayMemory
from toolkit.data.table import TensorTable
from toolkit.dynamic.callback import Lifecycle
from toolkit.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.dynamic.lifecycle_options import DynamicRunConfig, LifecycleOptions
from toolkit.dynamic.remember import Remember
from toolkit.dynamic.report import LifecycleReport
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.callbacks.expert_balance import WholeStepBalance
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.optim import build_optimizer, constant

DIM, CLASSES, TASKS, PER_TASK, BATCH, EPOCHS_PER_TASK = 6, 4, 2, 120, 12, 5
STEPS = TASKS * EPOCHS_PER_TASK * PER_TASK // BATCH

EVENTFUL = LifecycleOptions(
    check_every=3,
    check_samples=36,
    cooldown_checks=4,
    sleep_every=14,
    min_sleep_every=9,
    memory_size=40,
    replay_steps=2,
    replay_lr=1e-2,
    prune_below=0.8,
    min_age=12,
    merge_distance=0.95,
    merge_similarity=0.3,
    undo_above=1.0,
)
"""In 100 steps: growths, merges, prunes, at least five sleeps, and something undone."""


class DynamicModel(nn.Module):
    def __init__(self, groups: ExpertGroups, experts: int, logical_experts: int):
        super().__init__()
        self.stem = nn.Linear(DIM, 10)
        self.moe = make_dynamic_moe(10, 7, experts, 2, groups=groups, max_experts=logical_experts)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(h + self.moe(h))


def dynamic_table() -> TensorTable:
    """Two tasks: four clouds each, those of the second elsewhere and with other labels."""
    draws = torch.Generator().manual_seed(3)
    label = torch.arange(TASKS * PER_TASK) % CLASSES
    task = torch.arange(TASKS * PER_TASK) // PER_TASK
    centres = 2 * torch.randn(TASKS, CLASSES, DIM, generator=draws, dtype=torch.float64)
    noise = torch.randn(len(label), DIM, generator=draws, dtype=torch.float64)
    return TensorTable(input=centres[task, (label + task) % CLASSES] + 0.6 * noise, label=label, task=task)


def dynamic_config(folder: Path, *, lifecycle: LifecycleOptions = EVENTFUL, **settings: Any) -> DynamicRunConfig:
    settings = {"experts": 3, "max_experts": 8, "batch_size": BATCH, "lr": 0.01, "log_every": 4} | settings
    return DynamicRunConfig(run_dir=folder, tracker="none", cpu=True, lifecycle=lifecycle, **settings)


@contextmanager
def dynamic_trainer(
    config: DynamicRunConfig,
    *,
    ep_size: int = 1,
    callbacks: tuple[tk.Callback, ...] = (),
    reported: bool = False,
    augment: Augment | None = None,
) -> Iterator[tuple[tk.Trainer, Lifecycle]]:
    with tk.start_run("dynamic", config) as run:
        torch.manual_seed(0)
        model = DynamicModel(make_expert_groups(ep_size), config.experts, config.logical_experts).double()
        table, where = dynamic_table(), {"rank": run.rank, "world_size": run.world_size}
        penalty = tk.experts.RouterPenalty(model, balance_weight=0.001)
        task, balance = tk.Classification(penalty=penalty), WholeStepBalance(penalty)
        memory = ReplayMemory(table, config.lifecycle.memory_size, seed=config.seed)
        lifecycle = Lifecycle(model, task, memory, config.lifecycle)
        order = TaskAfterTask(
            tasks=TASKS,
            samples_per_task=PER_TASK,
            batch_size=BATCH,
            seed=config.seed,
            epochs_per_task=EPOCHS_PER_TASK,
        )
        yield (
            tk.Trainer(
                run,
                task,
                model,
                build_optimizer(model, config),
                TrainBatches(
                    table,
                    batch_size=BATCH,
                    seed=config.seed,
                    order=order,
                    accumulation=config.gradient_accumulation_steps,
                    augment=augment,
                    **where,
                ),
                max_steps=config.max_steps or STEPS,
                schedule=constant(),
                log_every=config.log_every,
                callbacks=[
                    balance,
                    ExpertLoad(model),
                    Remember(memory, every=2),
                    lifecycle,
                    *([LifecycleReport(model, lifecycle=lifecycle, num_classes=CLASSES)] if reported else []),
                    Evaluation(EvalBatches(table, batch_size=50, **where)),
                    Checkpointing(config.checkpoint),
                    *callbacks,
                ],
            ),
            lifecycle,
        )


def history_of(lifecycle: Lifecycle) -> list[tuple[int, str, tuple[int, ...]]]:
    """(step, kind, uids) of each event."""
    return [(event.step, event.kind, event.uids) for event in lifecycle.history]
