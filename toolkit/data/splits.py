"""Training and evaluation data of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import Dataset

from toolkit.data.table import TensorTable

Samples = TensorTable | Dataset[Any] | Iterable[Any]
"""A table, data set or DataLoader. Its samples are dicts of tensors, or pairs, which become the columns `input` and
`label`."""


@runtime_checkable
class HasSplits(Protocol):
    """Data of a run, as `load_images` returns them, or `Splits`."""

    @property
    def train(self) -> Any:
        """Training data."""
        ...

    @property
    def test(self) -> Any:
        """Test data."""
        ...


class Splits(NamedTuple):
    """Your own tables, data sets or DataLoaders.

    Example:
        >>> import toolkit as tk, torch
        >>> table = tk.TensorTable(input=torch.randn(60, 4), label=torch.randint(3, (60,)))
        >>> splits = tk.Splits(train=table, test=table)
    """

    train: Samples
    test: Samples
    validation: Samples | None = None
