"""What is drawn for a sample at each visit, one sample in one epoch, whichever process sees it; dropout of pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.data.table import Batch
from toolkit.experts.parallel.seeding import generator

BANK_SIZE = 4093
"""Rows of a bank where each row is long: a prime, so that visits cycle through all of them."""


class VisitDraws:
    """Random rows that are a function of the visit, and so do not depend on the number of processes.

    `bank` (rows, ...) is drawn once, and its rows are looked up. Take a prime number of them, so that visits run
    through all of them.
    """

    def __init__(self, bank: Tensor):
        self.bank = bank

    def __call__(self, visits: Tensor) -> Tensor:
        """A row for each of `visits` (int64): epoch * samples + row of each sample of the batch."""
        # Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): neighbours get rows far apart.
        return self.bank.index_select(0, (visits * 2654435769 >> 7) % len(self.bank))


class BlankPixels:
    """Sets a random `fraction` of each uint8 image in `batch["input"]` to `grey`, others at each visit.

    Which pixels is a function of (seed, visit), where a visit is one sample in one epoch. So a run's loss curve does
    not depend on the number of processes. With dropout in the model it would, because each rank draws its own masks.
    """

    def __init__(self, fraction: float, *, shape: Sequence[int], grey: int, seed: int):
        self.grey = grey
        self.masks = VisitDraws(torch.rand(BANK_SIZE, *shape, generator=generator(seed, "blank pixels")) < fraction)

    def __call__(self, batch: Batch, visits: Tensor) -> Batch:
        """`visits` (int64): epoch * samples + row of each sample of the batch."""
        return {**batch, "input": batch["input"].masked_fill(self.masks(visits), self.grey)}
