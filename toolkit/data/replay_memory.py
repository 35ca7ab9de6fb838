"""A bounded memory of training examples, balanced over classes.

It holds row numbers of the training table, not examples: the same on every rank without communication, and a list of
integers in a checkpoint. A memory of `capacity` rows never draws any other row of the table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.data.table import TensorTable
from toolkit.experts.parallel.seeding import derive_seed, generator

PRIORITY_BITS = 40
MOST_EPOCHS = 2**20
"""Draws have the visits of as many epochs: what an augmentation draws is then another at each, but for rare chance."""


class ReplayMemory:
    """Keeps at most `capacity` rows of `table`, as evenly over its `label` as the rows seen allow.

    Of each class it keeps the rows with the least hashes of (seed, row): a uniform sample of the distinct rows seen
    (bottom-k sampling, Cohen & Kaplan 2007, PODC), which depends neither on the order in which they came nor on how
    often.
    """

    def __init__(self, table: TensorTable, capacity: int, *, seed: int):
        if capacity < 1:
            raise ValueError(f"a memory of {capacity} rows")
        self.table, self.capacity, self.seed = table, capacity, seed
        self.rows = torch.empty(0, dtype=torch.int64)
        """Row numbers of what is remembered, (len(self),), in ascending order."""
        self._salt = derive_seed(seed, "memory") >> 1

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Tensor) -> None:
        """Record the examples at `rows` (N,) of the table as seen. Call it with the same rows on all ranks."""
        rows = torch.cat([self.rows, rows.cpu()]).unique()
        stratum = self.table.columns["label"].index_select(0, rows).unique(return_inverse=True)[1]
        order = (stratum << PRIORITY_BITS | self._priority(rows)).argsort()
        counts = stratum.bincount()
        place = torch.empty_like(rows)  # of each row within its stratum, by priority
        place[order] = torch.arange(len(rows)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        # The first of each stratum, then the second of each, ...: what fits is as even as it can be.
        kept = (place * len(counts) + stratum).argsort()[: self.capacity]
        self.rows = rows[kept].sort().values

    def draw(self, count: int, *address: int | str) -> Tensor:
        """`count` remembered rows, drawn at `address`, such as ("sleep", step): without repetition if there are enough.

        The same on all ranks. Raises ValueError where nothing is remembered.
        """
        if not len(self):
            raise ValueError("nothing to draw from: the memory is empty")
        draws = generator(self.seed, "replay", *address)
        rounds = -(-count // len(self))
        order = torch.cat([torch.randperm(len(self), generator=draws) for _ in range(rounds)])
        return self.rows[order[:count]]

    def draw_visits(self, count: int, *address: int | str) -> Tensor:
        """The rows of `draw` as visits (epoch * samples + row), for `TrainBatches`: an `augment` changes a row in
        another way at another address.
        """
        epoch = derive_seed(self.seed, "visits", *address) % MOST_EPOCHS
        return self.draw(count, *address) + epoch * len(self.table)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, equal on all ranks."""
        return {"rows": self.rows.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, of a memory of the same table."""
        self.rows = torch.tensor(state["rows"], dtype=torch.int64)

    def _priority(self, rows: Tensor) -> Tensor:
        """A hash of each row of `PRIORITY_BITS` bits: the finalizer of SplitMix64 (Steele et al. 2014, OOPSLA)."""
        hashed = rows * -7046029254386353131 + self._salt  # 0x9E3779B97F4A7C15 as int64, which wraps around
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            hashed = (hashed ^ _shifted(hashed, shift)) * factor
        return _shifted(hashed ^ _shifted(hashed, 31), 64 - PRIORITY_BITS)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
