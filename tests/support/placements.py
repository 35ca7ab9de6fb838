"""Placements by the slots of their experts."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.experts.placement.placement import ExpertPlacement


def by_slot(slot_of_expert: Sequence[int], ranks: int) -> ExpertPlacement:
    """Return a placement whose expert e is in slot `slot_of_expert[e]`, counted through `ranks` equal ranks."""
    experts = sorted(range(len(slot_of_expert)), key=slot_of_expert.__getitem__)
    per_rank = len(experts) // ranks
    return ExpertPlacement(tuple(tuple(experts[rank * per_rank :][:per_rank]) for rank in range(ranks)))
