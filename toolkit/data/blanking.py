"""Dropout of pixels that does not depend on which process sees an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.seeding import generator
from toolkit.task import Batch

BANK_SIZE = 4093
"""Number of masks, drawn once; a prime, so that visits cycle through all of them."""


class BlankPixels:
    """Sets a random `fraction` of each uint8 image in `batch["input"]` to `grey`, others at each visit.

    Which pixels is a function of (seed, visit), where a visit is one sample in one epoch. So a run's loss curve does
    not depend on the number of processes. With dropout in the model it would, because each rank draws its own masks.
    """

    def __init__(self, fraction: float, *, shape: Sequence[int], grey: int, seed: int):
        self.grey = grey
        self.masks = torch.rand(BANK_SIZE, *shape, generator=generator(seed, "blank pixels")) < fraction

    def __call__(self, batch: Batch, visits: Tensor) -> Batch:
        """`visits` (int64): epoch * samples + row of each sample of the batch."""
        # Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): neighbours get masks far apart.
        places = (visits * 2654435769 >> 7) % BANK_SIZE
        return {**batch, "input": batch["input"].masked_fill(self.masks.index_select(0, places), self.grey)}
