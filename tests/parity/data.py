"""The samples of the comparison with one process, and how each training loop splits them over steps and ranks."""

from __future__ import annotations

from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.parity.models import LENGTH, VOCAB
from toolkit.data.batches import BatchOrder, split

BATCH, STEPS = 16, 3
SAMPLES, FULL = 37, 48
"""Two full batches and one of 5, which leaves some ranks without a sample; three full batches."""
TRAIN = torch.randint(3, VOCAB, (FULL, LENGTH), generator=torch.Generator().manual_seed(1))
TEST = torch.randint(3, VOCAB, (8, LENGTH), generator=torch.Generator().manual_seed(2))

Rows = list[list[Tensor]]
"""The samples of each micro-batch of each step, on one rank."""


def summed_loss(logits_BLV: Tensor, ids_BL: Tensor) -> Tensor:
    """Return the summed cross-entropy of the next tokens."""
    return cross_entropy(logits_BLV[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten(), reduction="sum")


def targets(rows: Tensor) -> int:
    """Return the number of tokens that `summed_loss` covers for these samples."""
    return len(rows) * (LENGTH - 1)


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def unequal_share(rows: Tensor, rank: int, world: int) -> Tensor:
    """Return the part of a rank: half of the samples for rank 0, and the rest split over the others."""
    if world == 1:
        return rows
    half = len(rows) // 2
    return rows[:half] if rank == 0 else rows[half:].tensor_split(world - 1)[rank - 1]


def order(samples: int) -> BatchOrder:
    return BatchOrder(num_samples=samples, batch_size=BATCH, seed=0)


def unequal_rows(accumulation: int, rank: int, world: int) -> Rows:
    """Split steps as a loop of a user may do: into micro-batches, and those unequally over ranks."""
    steps = islice(order(SAMPLES).batches(0), STEPS)
    return [[unequal_share(part, rank, world) for part in rows.chunk(accumulation)] for rows in steps]


def trainer_rows(samples: int, accumulation: int, rank: int, world: int) -> Rows:
    """Split steps as `TrainBatches`."""
    steps = islice(order(samples).batches(0), STEPS)
    return [[split(split(rows, accumulation, part), world, rank) for part in range(accumulation)] for rows in steps]


def transformers_rows(accumulation: int, rank: int, world: int) -> Rows:
    """Split steps as transformers' Trainer with a sequential sampler. With accumulation, the last step of an epoch has
    one micro-batch."""
    steps = torch.arange(transformers_samples(accumulation)).split(BATCH)
    return [[part.chunk(world)[rank] for part in rows.split(BATCH // accumulation)] for rows in steps]


def transformers_samples(accumulation: int) -> int:
    return FULL - (BATCH // 2 if accumulation > 1 else 0)
