"""The order of a stream of tasks, which makes dynamic experts grow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from toolkit.data.batches import BatchOrder
from toolkit.experts.parallel.seeding import derive_seed


@dataclass(frozen=True, kw_only=True)
class TaskAfterTask:
    """All epochs of a task before any of the next one, and after the last task the first again."""

    tasks: int
    samples_per_task: int
    """Rows of each task, which follow the previous task's."""
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
        _, steps = self._place(step)
        return self.orders[0].epoch_of(steps)

    def batches(self, start_step: int) -> Iterator[Tensor]:
        for step in itertools.count(start_step):
            task, steps = self._place(step)
            yield next(self.orders[task].batches(steps)) + task * self.samples_per_task

    def _place(self, step: int) -> tuple[int, int]:
        """Return the task, and its steps so far."""
        epoch, steps = divmod(step, self.steps_per_epoch)
        return steps // self.steps_per_task, epoch * self.steps_per_task + steps % self.steps_per_task
