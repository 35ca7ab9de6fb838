"""A data set in memory (or mapped from disk): named tensors with one row per example."""

from __future__ import annotations

from torch import Tensor

from toolkit.errors import UserError

Batch = dict[str, Tensor]
"""The columns of some samples by name: the samples are the first axis of every tensor."""


class TensorTable:
    """Columns of equal length, fetched by whole batches: one gather per column, never a loop over examples.

    Raises UserError for a column that is no tensor, and ValueError for columns of unequal length.
    """

    def __init__(self, **columns: Tensor):
        for name, column in columns.items():
            if not isinstance(column, Tensor):
                kind = type(column).__name__
                raise UserError(
                    f"the column `{name}` is a {kind}: give a tensor, as torch.from_numpy makes of an array."
                )
        lengths = {name: len(column) for name, column in columns.items()}
        if not columns or len(set(lengths.values())) != 1:
            raise ValueError(f"columns need one common length, got {lengths}")
        self.columns = columns
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rows: Tensor) -> Batch:
        """The examples at `rows` (a 1-d int64 tensor), as a new batch."""
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}
