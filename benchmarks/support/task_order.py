"""Batches of a sequence of tasks, a data shift that makes dynamic experts grow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from toolkit.data.batches import BatchOrder
from toolkit.experts.parallel.seeding import derive_seed


@dataclass(frozen=True, kw_only=True)
class TaskOrder:
    """Order of all epochs of one task after the other, repeated from the first task after the last one."""

    tasks: int
    samples_per_task: int
    """Rows of each task; the rows of the tasks follow each other."""
    batch_size: int
    seed: int
    epochs_per_task: int

    @cached_property
    def orders(self) -> list[BatchOrder]:
        seeds = [derive_seed(self.seed, "task", task) for task in range(self.tasks)]
        return [BatchOrder(num_samples=self.samples_per_task, batch_size=self.batch_size, seed=seed) for seed in seeds]

    @property
    def steps_per_task(self) -> int:
        return self.orders[0].steps_per_epoch * self.epochs_per_task

    @property
    def steps_per_epoch(self) -> int:
        return self.tasks * self.steps_per_task

    def samples_before(self, step: int) -> int:
        tasks, steps = divmod(step, self.steps_per_task)
        return tasks * self.epochs_per_task * self.samples_per_task + self.orders[0].samples_before(steps)

    def epoch_of(self, step: int) -> int:
        _, steps = self._task_and_step(step)
        return self.orders[0].epoch_of(steps)

    def batches(self, start_step: int) -> Iterator[Tensor]:
        for step in itertools.count(start_step):
            task, steps = self._task_and_step(step)
            yield next(self.orders[task].batches(steps)) + task * self.samples_per_task

    def _task_and_step(self, step: int) -> tuple[int, int]:
        """Return the task of a step, and the number of steps of the task before this one."""
        epoch, steps = divmod(step, self.steps_per_epoch)
        return steps // self.steps_per_task, epoch * self.steps_per_task + steps % self.steps_per_task
