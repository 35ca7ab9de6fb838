"""A bounded, class-balanced replay buffer of training samples.

The buffer holds row numbers of the training table, not samples. They are equal on all ranks without communication, and
a list of integers in a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.data.table import TensorTable
from toolkit.experts.parallel.seeding import derive_seed, generator

PRIORITY_BITS = 40
MOST_EPOCHS = 2**20
"""Range of the epoch numbers of `draw_visits`, large enough that two addresses rarely share an augmentation."""


class ReplayMemory:
    """Replay buffer of at most `capacity` rows of `table`, balanced over its column "label".

    Each class keeps the rows with the smallest hashes of (seed, row). This is a uniform sample of the distinct rows
    seen (bottom-k sampling, Cohen & Kaplan 2007, PODC), independent of their order and number of repetitions.
    """

    def __init__(self, table: TensorTable, capacity: int, *, seed: int):
        if capacity < 1:
            raise ValueError(f"a memory of {capacity} rows")
        self.table, self.capacity, self.seed = table, capacity, seed
        self.rows = torch.empty(0, dtype=torch.int64)
        """Row numbers in the buffer, shape (len(self),), in ascending order."""
        self._salt = derive_seed(seed, "memory") >> 1

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Tensor) -> None:
        """Add `rows`, shape (N,), of the table to the buffer. Call it with the same rows on all ranks."""
        rows = torch.cat([self.rows, rows.cpu()]).unique()
        stratum = self.table.columns["label"].index_select(0, rows).unique(return_inverse=True)[1]
        order = (stratum << PRIORITY_BITS | self._priority(rows)).argsort()
        counts = stratum.bincount()
        place = torch.empty_like(rows)  # rank of each row within its stratum, by priority
        place[order] = torch.arange(len(rows)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        # Round-robin over strata keeps their counts as equal as possible.
        kept = (place * len(counts) + stratum).argsort()[: self.capacity]
        self.rows = rows[kept].sort().values

    def draw(self, count: int, *address: int | str) -> Tensor:
        """Draw `count` rows, equal on all ranks, without repetition if the buffer holds enough.

        Args:
            count: Number of rows.
            address: Seed of the draw in addition to the buffer's, such as ("sleep", step).

        Returns:
            Row numbers of the table, shape (count,).

        Raises:
            ValueError: The buffer is empty.
        """
        if not len(self):
            raise ValueError("nothing to draw from: the memory is empty")
        draws = generator(self.seed, "replay", *address)
        rounds = -(-count // len(self))
        order = torch.cat([torch.randperm(len(self), generator=draws) for _ in range(rounds)])
        return self.rows[order[:count]]

    def draw_visits(self, count: int, *address: int | str) -> Tensor:
        """Draw rows as sample accesses (epoch * samples + row) for `TrainBatches`.

        An `augment` then draws differently at each address.
        """
        epoch = derive_seed(self.seed, "visits", *address) % MOST_EPOCHS
        return self.draw(count, *address) + epoch * len(self.table)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values, equal on all ranks."""
        return {"rows": self.rows.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a buffer over the same table."""
        self.rows = torch.tensor(state["rows"], dtype=torch.int64)

    def _priority(self, rows: Tensor) -> Tensor:
        """Hash each row to `PRIORITY_BITS` bits with the finalizer of SplitMix64 (Steele et al. 2014, OOPSLA)."""
        hashed = rows * -7046029254386353131 + self._salt  # 0x9E3779B97F4A7C15 as int64, which wraps around
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            hashed = (hashed ^ _shifted(hashed, shift)) * factor
        return _shifted(hashed ^ _shifted(hashed, 31), 64 - PRIORITY_BITS)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift right logically; `>>` of torch copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
