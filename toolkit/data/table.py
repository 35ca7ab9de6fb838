"""A data set in memory, or memory-mapped: named tensors with one row per sample."""

from __future__ import annotations

from torch import Tensor

from toolkit.errors import require_type

Batch = dict[str, Tensor]
"""Columns by name. The first dimension of every tensor is the batch."""


class TensorTable:
    """Named columns of equal length, read in batches with one gather per column.

    Args:
        columns: Tensors with one row per sample.

    Raises:
        UserError: A column is not a tensor.
        ValueError: The columns have different lengths.

    Example:
        >>> import toolkit as tk, torch
        >>> table = tk.TensorTable(input=torch.randn(60, 4), label=torch.arange(60) % 3)
        >>> table[torch.tensor([4, 5])]["label"]
        tensor([1, 2])
    """

    def __init__(self, **columns: Tensor):
        for name, column in columns.items():
            require_type(name, column, Tensor, "Pass a tensor, such as the result of torch.from_numpy")
        lengths = {name: len(column) for name, column in columns.items()}
        if not columns or len(set(lengths.values())) != 1:
            raise ValueError(f"columns need one common length, got {lengths}")
        self.columns = columns
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rows: Tensor) -> Batch:
        """Gather the samples at `rows`, int64 of shape (B,), into a new batch."""
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}
