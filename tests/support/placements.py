"""Placements by slot."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.experts.placement.placement import ExpertPlacement


def by_slot(slot_of_expert: Sequence[int], ranks: int) -> ExpertPlacement:
    """Return the placement of expert e in slot `slot_of_expert[e]`, numbered over ranks with equal slots."""
    experts = sorted(range(len(slot_of_expert)), key=slot_of_expert.__getitem__)
    per_rank = len(experts) // ranks
    return ExpertPlacement(tuple(tuple(experts[rank * per_rank :][:per_rank]) for rank in range(ranks)))
