"""The order of training samples, and how each rank gets its part of a batch.

The order of the data is a pure function of (seed, epoch), and the position in it is one integer: the step. So a run
resumes by asking for step n, on any number of processes. Accelerate's own splitting of batches is not used because on a
short last batch it gives some ranks no micro-batch at all, and under expert parallelism a forward pass is a collective:
here such a rank gets an empty one. (`docs/project/notes/data.md`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader

from toolkit.data.identity import Identity, identity_of
from toolkit.data.table import Batch, TensorTable
from toolkit.experts.parallel.seeding import generator

Augment = Callable[[Batch, Tensor], Batch]
"""Changes a training batch, given the visit (epoch * samples + row) of each of its samples."""


def split(rows: Tensor, parts: int, part: int) -> Tensor:
    """The `part`-th of `parts` consecutive pieces of `rows`, whose lengths differ by one at most."""
    if parts == 1:  # the usual case, and slicing costs as much as a third of a fetch
        return rows
    return rows[slice(*bounds(len(rows), parts, part))]


def bounds(size: int, parts: int, part: int) -> tuple[int, int]:
    """The row at which the `part`-th of `parts` pieces of `size` rows begins, and the one at which it ends."""
    return part * size // parts, (part + 1) * size // parts


class Order(Protocol):
    """The rows of a table that make up the global batch of each step: a pure function of the step."""

    @property
    def steps_per_epoch(self) -> int: ...

    def samples_before(self, step: int) -> int: ...

    def epoch_of(self, step: int) -> int:
        """How often the rows of `step` were in a batch before."""
        ...

    def batches(self, start_step: int) -> Iterator[Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The order of global batches: each epoch is a new permutation, its last batch may be short."""

    num_samples: int
    batch_size: int
    """Examples per optimizer step, over all ranks and micro-batches."""
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.batch_size < 1:
            raise ValueError(f"no batches of {self.batch_size} out of {self.num_samples} samples")

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_samples / self.batch_size)

    def epoch(self, epoch: int) -> Tensor:
        """All row numbers in the order of `epoch`."""
        return torch.randperm(self.num_samples, generator=generator(self.seed, "order", epoch))

    def samples_before(self, step: int) -> int:
        """How many examples the steps before `step` took."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.num_samples + steps * self.batch_size

    def epoch_of(self, step: int) -> int:
        """How often the rows of `step` were in a batch before."""
        return step // self.steps_per_epoch

    def batches(self, start_step: int) -> Iterator[Tensor]:
        """The global batches of steps `start_step`, `start_step` + 1, ... without end."""
        epoch, skip = divmod(start_step, self.steps_per_epoch)
        while True:
            yield from self.epoch(epoch).split(self.batch_size)[skip:]
            epoch, skip = epoch + 1, 0


class _OfTable:
    """Batches of this rank, on its device, of the samples of a table."""

    def __init__(self, table: TensorTable, rank: int, world_size: int, device: torch.device | str, num_workers: int):
        self.table, self.rank, self.world_size = table, rank, world_size
        self.device, self.num_workers = torch.device(device), num_workers

    def identity(self) -> Identity:
        """The identity of the table, see `toolkit.data.identity`."""
        return identity_of(self.table)


class TrainBatches(_OfTable):
    """This rank's micro-batches of each step, on its device.

    A global batch is split into micro-batches first, and each micro-batch over ranks, so that the samples of a
    micro-step do not depend on the world size. Without an `order`, which must be made for the same `batch_size`, the
    table is reshuffled each epoch.
    """

    def __init__(
        self,
        table: TensorTable,
        *,
        batch_size: int,
        seed: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        num_workers: int = 0,
        augment: Augment | None = None,
        order: Order | None = None,
    ):
        super().__init__(table, rank, world_size, device, num_workers)
        self.source = AccessedTable(table, augment)
        self.order: Order = order or BatchOrder(num_samples=len(table), batch_size=batch_size, seed=seed)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.accumulation = accumulation

    def samples_of(self, step: int) -> int:
        """Samples of the global batch of `step`."""
        return self.order.samples_before(step + 1) - self.order.samples_before(step)

    def empty(self) -> Batch:
        """A batch without samples."""
        return send_to_device(self.source[torch.arange(0)], self.device)

    def visits(self, start_step: int) -> Iterator[Tensor]:
        """The sample accesses of this rank's micro-batches from `start_step` on, `accumulation` of them per step."""
        for step, batch in enumerate(self.order.batches(start_step), start_step):
            batch = batch + self.order.epoch_of(step) * len(self.table)
            yield from self.parts_of(batch)

    def rows_of(self, step: int) -> list[int]:
        """The row numbers of the global batch of `step`."""
        return next(self.order.batches(step)).tolist()

    def micro_batches_of(self, visits: Tensor) -> list[Batch]:
        """This rank's micro-batches of a global batch of `visits` (epoch * samples + row), augmented as others are."""
        return list(fetch(self.source, iter(self.parts_of(visits)), self.device, num_workers=0))

    def parts_of(self, rows: Tensor) -> list[Tensor]:
        """This rank's part of each micro-batch of a global batch of `rows`, or of visits."""
        micro = (split(rows, self.accumulation, index) for index in range(self.accumulation))
        return [split(part, self.world_size, self.rank) for part in micro]

    def part_of(self, rows: Tensor) -> Batch:
        """This rank's part of `rows` in one batch, as they are in the table."""
        return next(fetch(self.table, iter([split(rows, self.world_size, self.rank)]), self.device, num_workers=0))

    def steps(self, start_step: int) -> Iterator[list[Batch]]:
        """Lists of this rank's micro-batches, from `start_step` on, without end."""
        micro_batches = fetch(self.source, self.visits(start_step), self.device, self.num_workers)
        while True:
            yield [next(micro_batches) for _ in range(self.accumulation)]


class EvalBatches(_OfTable):
    """Full table in its own order, each example on exactly one rank.

    `batch_size` counts the examples of all ranks. Every rank gets the same number of batches, some of them short or
    empty, because a forward pass may be a collective.
    """

    def __init__(
        self,
        table: TensorTable,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        num_workers: int = 0,
    ):
        super().__init__(table, rank, world_size, device, num_workers)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Batch]:
        batches = torch.arange(len(self.table)).split(self.batch_size)
        rows = (split(batch, self.world_size, self.rank) for batch in batches)
        return fetch(self.table, rows, self.device, self.num_workers)


class AccessedTable:
    """A table indexed by sample accesses (epoch * samples + row) instead of rows, augmented if `augment` is set."""

    def __init__(self, table: TensorTable, augment: Augment | None):
        self.table, self.augment = table, augment

    def __getitem__(self, visits: Tensor) -> Batch:
        batch = self.table[visits % len(self.table)]
        return batch if self.augment is None else self.augment(batch, visits)


def fetch(
    table: TensorTable | AccessedTable, rows: Iterator[Tensor], device: torch.device, num_workers: int
) -> Iterator[Batch]:
    """The batches at `rows`, on `device`. Worker processes fetch ahead; without them a gather is done in line."""
    if num_workers == 0 and device.type == "cpu":
        return (table[index] for index in rows)
    batches: DataLoader[Batch] = DataLoader(
        table,  # type: ignore[arg-type]
        batch_size=None,
        sampler=rows,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else the loader would draw from the default one
    )
    return (send_to_device(batch, device, non_blocking=True) for batch in batches)
