"""A small run that splits, merges and prunes experts, for any world size."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import toolkit as tk
from benchmarks.support.task_order import TaskOrder
from tests.support.trainers import standard_trainer
from toolkit.data.batches import Augment
from toolkit.data.replay_memory import ReplayMemory
from toolkit.dynamic.callback import Lifecycle
from toolkit.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.dynamic.lifecycle_options import DynamicRunConfig, LifecycleOptions
from toolkit.dynamic.remember import Remember
from toolkit.dynamic.report import LifecycleReport
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.train.callbacks.expert_balance import WholeStepBalance

DIM, CLASSES, TASKS, PER_TASK, BATCH = 6, 4, 2, 120, 12

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
"""Options that give growths, merges, prunes, at least five sleeps and an undone change in 100 steps."""


class DynamicModel(nn.Module):
    def __init__(self, groups: ExpertGroups, experts: int, logical_experts: int):
        super().__init__()
        self.stem = nn.Linear(DIM, 10)
        self.moe = make_dynamic_moe(10, 7, experts, 2, groups=groups, max_experts=logical_experts)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(h + self.moe(h))


def dynamic_table() -> tk.TensorTable:
    """Return two tasks of four clusters each, with different centres and labels."""
    draws = torch.Generator().manual_seed(3)
    label = torch.arange(TASKS * PER_TASK) % CLASSES
    task = torch.arange(TASKS * PER_TASK) // PER_TASK
    centres = 2 * torch.randn(TASKS, CLASSES, DIM, generator=draws, dtype=torch.float64)
    noise = torch.randn(len(label), DIM, generator=draws, dtype=torch.float64)
    return tk.TensorTable(input=centres[task, (label + task) % CLASSES] + 0.6 * noise, label=label, task=task)


def dynamic_config(folder: Path, *, lifecycle: LifecycleOptions = EVENTFUL, **settings: Any) -> DynamicRunConfig:
    settings = {"experts": 3, "max_experts": 8, "batch_size": BATCH, "lr": 0.01, "log_every": 4} | settings
    settings["schedule"] = tk.ScheduleOptions(kind="constant")
    return DynamicRunConfig(run_dir=folder, tracker="none", cpu=True, lifecycle=lifecycle, **settings)


@contextmanager
def dynamic_trainer(
    config: DynamicRunConfig,
    *,
    ep_size: int = 1,
    callbacks: Sequence[tk.Callback] = (),
    reported: bool = False,
    augment: Augment | None = None,
) -> Iterator[tuple[tk.Trainer, Lifecycle]]:
    with tk.start_run("dynamic", config.replace(ep_size=ep_size)) as run:
        torch.manual_seed(0)
        model = DynamicModel(run.expert_groups, config.experts, config.logical_experts).double()
        table = dynamic_table()
        penalty = tk.experts.RouterPenalty(model, balance_weight=0.001)
        task = tk.Classification(penalty=penalty)
        memory = ReplayMemory(table, config.lifecycle.memory_size, seed=config.seed)
        lifecycle = Lifecycle(model, task, memory, config.lifecycle)
        report = [LifecycleReport(model, lifecycle=lifecycle, num_classes=CLASSES)] if reported else []
        order = TaskOrder(tasks=TASKS, samples_per_task=PER_TASK, batch_size=BATCH, seed=config.seed, epochs_per_task=5)
        first = [WholeStepBalance(penalty), Remember(memory, every=2), lifecycle, *report, *callbacks]
        settings = {"order": order, "augment": augment, "callbacks": first}
        yield standard_trainer(run, task, model, train=table, test=table, **settings), lifecycle


def history_of(lifecycle: Lifecycle) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return (step, kind, uids) of each event."""
    return [(event.step, event.kind, event.uids) for event in lifecycle.history]
