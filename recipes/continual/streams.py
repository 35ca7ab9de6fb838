"""Task streams: the same images as several tasks, learned one after another and tested on held-out data of each.

Class-, domain- and task-incremental learning are the three scenarios of van de Ven et al. 2022 (Nature Machine
Intelligence 4): a task brings new classes, or the same classes with transformed inputs, or is identified at test time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Literal

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn import functional as F

from toolkit.data.batches import BatchOrder
from toolkit.data.images import ImageData
from toolkit.data.table import Batch, TensorTable
from toolkit.errors import require, require_choice
from toolkit.experts.parallel.seeding import derive_seed, generator

Scenario = Literal["class", "domain", "task"]
ROTATED_AT_ONCE = 1000
"""Images that are turned at one time, as float32."""


@dataclass(frozen=True)
class TaskStream:
    """Tables with the columns "input" (N, 28, 28) uint8, "label" and "task" (N,) int64."""

    name: str
    train: TensorTable
    """The training examples of all tasks, those of one task after those of another."""
    tests: tuple[TensorTable, ...]
    """The held-out examples of each task."""
    num_classes: int
    """How many different labels there are over all tasks."""
    classes: tuple[tuple[int, ...], ...] | None = None
    """The labels that each task can have, where it is known which task an example is of; else None."""

    @property
    def num_tasks(self) -> int:
        return len(self.tests)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many training examples each task has."""
        return tuple(self.train.columns["task"].bincount(minlength=self.num_tasks).tolist())


def split_stream(
    data: ImageData, *, num_tasks: int = 5, scenario: Scenario = "class", samples_per_task: int | None = None
) -> TaskStream:
    """Each task has some of the classes, in order: 0 and 1, then 2 and 3, ...; the first `samples_per_task` of them in
    training, where that is given.

    In the scenario "class" an answer is one of all classes seen; in "domain" it is the place of the class within its
    task (for digits and five tasks: even or odd); in "task" it is one of the classes of the task.
    Raises UserError for another scenario, and for a number of tasks that does not divide the classes.
    """
    require_choice("scenario", scenario, Scenario)
    fits = 2 <= num_tasks <= data.num_classes and data.num_classes % num_tasks == 0
    require(fits, "num_tasks", num_tasks, f"take two or more that divide the {data.num_classes} classes")
    each = data.num_classes // num_tasks
    classes = tuple(tuple(range(first, first + each)) for first in range(0, data.num_classes, each))

    def part(table: TensorTable, task: int, most: int | None = None) -> TensorTable:
        labels = table.columns["label"]
        rows = (labels // each == task).nonzero()[:most, 0]
        labels = labels[rows] % each if scenario == "domain" else labels[rows]
        return _task_table(table.columns["input"][rows], labels, task)

    tests = tuple(part(data.test, task) for task in range(num_tasks))
    return TaskStream(
        f"split_{scenario}",
        _joined([part(data.train, task, samples_per_task) for task in range(num_tasks)]),
        tests,
        num_classes=each if scenario == "domain" else data.num_classes,
        classes=classes if scenario == "task" else None,
    )


def permuted_stream(data: ImageData, *, seed: int, num_tasks: int = 5, divided: bool = False) -> TaskStream:
    """Each task has the pixels in another order, the first one in their own (Goodfellow et al. 2013, arXiv 1312.6211).

    `divided` partitions the images over the tasks; else every task has all of them.
    """
    pixels = math.prod(data.train.columns["input"].shape[1:])
    orders = [torch.arange(pixels)]
    orders += [torch.randperm(pixels, generator=generator(seed, "pixels", task)) for task in range(1, num_tasks)]

    def permute(images: Shaped[Tensor, "N H W"], task: int) -> Shaped[Tensor, "N H W"]:
        return images.flatten(1).index_select(1, orders[task]).view_as(images)

    return _domains("permuted", data, permute, seed=seed, num_tasks=num_tasks, divided=divided)


def rotated_stream(
    data: ImageData, *, seed: int, num_tasks: int = 5, degrees_per_task: float = 15.0, divided: bool = False
) -> TaskStream:
    """Each task has the images turned by `degrees_per_task` more than the one before, the first one upright."""
    return _domains(
        "rotated",
        data,
        lambda images, task: rotate(images, degrees_per_task * task),
        seed=seed,
        num_tasks=num_tasks,
        divided=divided,
    )


def _domains(
    name: str,
    data: ImageData,
    transform: Callable[[Tensor, int], Tensor],
    *,
    seed: int,
    num_tasks: int,
    divided: bool,
) -> TaskStream:
    """A stream of the same classes, whose images `transform(images, task)` changes."""
    require(num_tasks >= 2, "num_tasks", num_tasks, "take two or more")

    def parts(table: TensorTable, split: str) -> list[TensorTable]:
        rows = [torch.arange(len(table))] * num_tasks
        if divided:
            shuffled = torch.randperm(len(table), generator=generator(seed, "deal", split))
            rows = [piece.sort().values for piece in shuffled.tensor_split(num_tasks)]
        taken: list[Batch] = [table[piece] for piece in rows]
        return [_task_table(transform(one["input"], task), one["label"], task) for task, one in enumerate(taken)]

    return TaskStream(name, _joined(parts(data.train, "train")), tuple(parts(data.test, "test")), data.num_classes)


def rotate(images: Shaped[Tensor, "N H W"], degrees: float) -> Shaped[Tensor, "N H W"]:
    """uint8 images (N, H, W) turned counter-clockwise about their middle, bilinear, black beyond the border."""
    if degrees == 0:
        return images
    cos = math.cos(math.radians(degrees))
    sin = math.sin(math.radians(degrees))
    # grid_sample maps pixels of the result to pixels of the input, with y downwards: the inverse rotation.
    affine = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]])
    turned = []
    for some in images.split(ROTATED_AT_ONCE):
        planes = some[None].float()  # one image of N channels: the same grid for all
        grid = F.affine_grid(affine[None], list(planes.shape), align_corners=False)
        turned.append(F.grid_sample(planes, grid, align_corners=False)[0].round().to(torch.uint8))
    return torch.cat(turned)


def _task_table(images: Tensor, labels: Tensor, task: int) -> TensorTable:
    return TensorTable(input=images, label=labels, task=torch.full_like(labels, task))


def _joined(tables: Sequence[TensorTable]) -> TensorTable:
    return TensorTable(**{name: torch.cat([t.columns[name] for t in tables]) for name in tables[0].columns})


@dataclass(frozen=True, kw_only=True)
class TaskOrder:
    """The order of global batches of a stream: all of a task, in a new order each time, before any of the next.

    For `TrainBatches(order=...)`. An epoch is the whole stream; after it comes the first task again.
    """

    sizes: tuple[int, ...]
    """Examples of each task; their rows follow each other in the table."""
    batch_size: int
    """Examples per optimizer step, over all ranks and micro-batches; the last batch of a task may be short."""
    seed: int
    epochs_per_task: int = 1
    """How often a task's examples are seen before the next one begins."""

    @cached_property
    def _orders(self) -> list[BatchOrder]:
        return [
            BatchOrder(num_samples=size, batch_size=self.batch_size, seed=derive_seed(self.seed, "task", task))
            for task, size in enumerate(self.sizes)
        ]

    @cached_property
    def task_ends(self) -> tuple[int, ...]:
        """How many steps have been made when each task of the first epoch has been learned."""
        return tuple(accumulate(order.steps_per_epoch * self.epochs_per_task for order in self._orders))

    @property
    def steps_per_epoch(self) -> int:
        return self.task_ends[-1]

    def samples_before(self, step: int) -> int:
        """How many examples the steps before `step` took."""
        epochs, task, steps = self._place(step)
        whole = epochs * sum(self.sizes) + sum(self.sizes[:task])
        return whole * self.epochs_per_task + (self._orders[task].samples_before(steps) if steps else 0)

    def epoch_of(self, step: int) -> int:
        """How often the rows of `step` were in a batch before."""
        epochs, task, steps = self._place(step)
        return epochs * self.epochs_per_task + self._orders[task].epoch_of(steps)

    def batches(self, start_step: int) -> Iterator[Tensor]:
        """The rows of the global batches of steps `start_step`, `start_step` + 1, ... without end."""
        epoch, task, skip = self._place(start_step)
        while True:
            order = self._orders[task]
            first_row = sum(self.sizes[:task])
            steps = order.steps_per_epoch * self.epochs_per_task
            for rows in islice(order.batches(epoch * steps + skip), steps - skip):
                yield rows + first_row
            skip, task = 0, task + 1
            if task == len(self.sizes):
                epoch, task = epoch + 1, 0

    def _place(self, step: int) -> tuple[int, int, int]:
        """Epoch, task and step within the task."""
        epoch, step = divmod(step, self.steps_per_epoch)
        task = bisect_right(self.task_ends, step)
        return epoch, task, step - (self.task_ends[task - 1] if task else 0)
