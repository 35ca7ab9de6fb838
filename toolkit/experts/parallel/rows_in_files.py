"""How files have the rows of all experts where they are not stacked along the first dimension, as in memory."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

RowsInFiles = Literal["stacked", "joined", "columns"]
"""E experts with A x B numbers each: (E, A, B); (E * A, B), one after another; or (A, B * E), the columns of experts
within those of B."""


def as_in_files(rows: Tensor, form: RowsInFiles) -> Tensor:
    """Returns the rows (E, A, B) of all experts as files of this form have them."""
    if form == "joined":
        return rows.flatten(0, 1)
    return rows.permute(1, 2, 0).flatten(1) if form == "columns" else rows


def stacked(saved: Tensor, form: RowsInFiles, experts: int) -> Tensor:
    """Returns the rows (E, A, B) of what files of this form have."""
    if form == "joined":
        return saved.view(experts, -1, saved.shape[1])
    return saved.view(len(saved), -1, experts).permute(2, 0, 1).contiguous() if form == "columns" else saved
