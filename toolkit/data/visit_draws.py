"""Random draws per sample access (epoch, index), independent of the rank that reads the sample; pixel dropout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.data.table import Batch
from toolkit.experts.parallel.seeding import generator

BANK_SIZE = 4093
"""Number of rows in a bank of long rows. It is prime, so that sample accesses cycle through all rows."""


class VisitDraws:
    """Random rows as a function of the sample access, independent of the world size.

    Args:
        bank: Rows drawn in advance, shape (rows, ...). Use a prime number of rows, so that sample accesses cycle
            through all of them.
    """

    def __init__(self, bank: Tensor):
        self.bank = bank

    def __call__(self, visits: Tensor) -> Tensor:
        """Look up a row for each of `visits`, int64 of epoch * samples + row for each sample of the batch."""
        # Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): neighbours get rows far apart.
        return self.bank.index_select(0, (visits * 2654435769 >> 7) % len(self.bank))


class BlankPixels:
    """Set a random `fraction` of the pixels of each uint8 image in `batch["input"]` to `grey`.

    The mask is a function of (seed, epoch, row), so the loss curve does not depend on the world size. With dropout in
    the model it would, because each rank draws its own masks.
    """

    def __init__(self, fraction: float, *, shape: Sequence[int], grey: int, seed: int):
        self.grey = grey
        self.masks = VisitDraws(torch.rand(BANK_SIZE, *shape, generator=generator(seed, "blank pixels")) < fraction)

    def __call__(self, batch: Batch, visits: Tensor) -> Batch:
        """Blank pixels of `batch`. `visits` is int64 of epoch * samples + row for each sample of the batch."""
        return {**batch, "input": batch["input"].masked_fill(self.masks(visits), self.grey)}
