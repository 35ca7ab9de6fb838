"""Tables of variable-length samples, and an order that batches samples of similar length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from toolkit.data.batches import BatchOrder
from toolkit.data.table import Batch, TensorTable
from toolkit.experts.parallel.seeding import generator

BATCHES_PER_POOL = 20


@dataclass(frozen=True)
class RaggedColumn:
    """Variable-length samples, concatenated in `values` of shape (total, ...)."""

    values: Tensor
    starts: Tensor
    """Offset of each sample in `values`, int64 of shape (N,)."""
    lengths: Tensor
    """Length of each sample, int64 of shape (N,)."""

    @classmethod
    def packed(cls, values: Tensor, lengths: Tensor) -> RaggedColumn:
        """Build a column from samples that are contiguous in `values`."""
        return cls(values, lengths.cumsum(0) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples at `rows`, zero-padded to shape (B, longest, ...), and their lengths of shape (B,)."""
        lengths = self.lengths[rows]
        longest = max(1, int(lengths.max())) if len(rows) else 1
        places = torch.arange(longest)
        beyond = places >= lengths[:, None]
        index = (self.starts[rows][:, None] + places).masked_fill(beyond, 0)
        padded = self.values.index_select(0, index.flatten()).unflatten(0, index.shape)
        return padded.masked_fill(beyond.view(*index.shape, *[1] * (self.values.ndim - 1)), 0), lengths


class RaggedTable(TensorTable):
    """Table with ragged columns. A batch holds the zero-padded column `x` and its lengths as `x_length`."""

    def __init__(self, **columns: Tensor | RaggedColumn):
        self.ragged = {name: column for name, column in columns.items() if isinstance(column, RaggedColumn)}
        lengths = {f"{name}_length": column.lengths for name, column in self.ragged.items()}
        dense: dict[str, Any] = {name: column for name, column in columns.items() if name not in self.ragged}
        super().__init__(**dense, **lengths)

    def __getitem__(self, rows: Tensor) -> Batch:
        return super().__getitem__(rows) | {name: column[rows][0] for name, column in self.ragged.items()}

    def select(self, rows: Tensor) -> RaggedTable:
        """Select the samples at `rows`. Values of ragged columns are shared, not copied."""
        dense = {name: column[rows] for name, column in self._dense().items()}
        ragged = {n: RaggedColumn(c.values, c.starts[rows], c.lengths[rows]) for n, c in self.ragged.items()}
        return RaggedTable(**dense, **ragged)

    def joined(self, other: RaggedTable) -> RaggedTable:
        """Concatenate two tables. Ragged columns are copied."""
        ragged = {}
        for name, column in self.ragged.items():
            more = other.ragged[name]
            starts = torch.cat([column.starts, more.starts + len(column.values)])
            values = torch.cat([column.values, more.values])
            lengths = torch.cat([column.lengths, more.lengths])
            ragged[name] = RaggedColumn(values, starts, lengths)
        dense = {name: torch.cat([column, other.columns[name]]) for name, column in self._dense().items()}
        return RaggedTable(**dense, **ragged)

    def _dense(self) -> dict[str, Tensor]:
        computed = {f"{name}_length" for name in self.ragged}
        return {name: column for name, column in self.columns.items() if name not in computed}


@dataclass(frozen=True, kw_only=True)
class BucketedOrder(BatchOrder):
    """Batches of samples of similar length, which reduces padding.

    Each epoch is a permutation. Pools of `BATCHES_PER_POOL` batches are sorted by length, then the batches are
    shuffled. The last batch of an epoch stays the last, because it can be smaller.
    """

    lengths: Tensor = field(repr=False)
    """Length of each sample, int64 of shape (num_samples,)."""

    @classmethod
    def of(cls, table: RaggedTable, column: str, *, batch_size: int, seed: int) -> BucketedOrder:
        """Build the order from the lengths of a ragged column of `table`."""
        lengths = table.ragged[column].lengths
        return cls(num_samples=len(table), batch_size=batch_size, seed=seed, lengths=lengths)

    def epoch(self, epoch: int) -> Tensor:
        order = super().epoch(epoch)
        whole = self.num_samples // self.batch_size * self.batch_size
        pools = order[:whole].split(BATCHES_PER_POOL * self.batch_size)
        ordered = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat([*ordered, order[:0]]).view(-1, self.batch_size)
        shuffled = torch.randperm(len(batches), generator=generator(self.seed, "order of batches", epoch))
        return torch.cat([batches[shuffled].flatten(), order[whole:]])
