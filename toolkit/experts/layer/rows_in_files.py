"""Layouts of stacked expert parameters in files."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

RowsInFiles = Literal["stacked", "joined", "columns"]
"""Layout of E experts with A x B numbers each: (E, A, B); (E * A, B), concatenated; or (A, B * E), with the E experts
interleaved in each column."""


def as_in_files(rows: Tensor, form: RowsInFiles) -> Tensor:
    """Return the rows (E, A, B) of all experts as files of this form have them."""
    if form == "joined":
        return rows.flatten(0, 1)
    return rows.permute(1, 2, 0).flatten(1) if form == "columns" else rows


def stacked(saved: Tensor, form: RowsInFiles, experts: int) -> Tensor:
    """Return the rows (E, A, B) of a tensor in files of this form."""
    if form == "joined":
        return saved.view(experts, -1, saved.shape[1])
    return saved.view(len(saved), -1, experts).permute(2, 0, 1).contiguous() if form == "columns" else saved
