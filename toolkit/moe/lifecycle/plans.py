"""What is to happen to a population, decided by pure functions of what was measured.

Every decision is a plan on expert ids (Grow, Merge, Prune) that says why. All ranks measure the same numbers, so all
make the same plans; `toolkit.moe.lifecycle.surgery` carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from toolkit.moe.lifecycle.roster import ExpertRoster
from toolkit.placement.placement import ExpertPlacement


@dataclass(frozen=True)
class Grow:
    """A new expert that takes over half of `parent`'s tokens: as its copy, or untrained (`fresh`)."""

    parent: int
    logical_id: int
    fresh: bool
    why: Mapping[str, float]


@dataclass(frozen=True)
class Merge:
    """Expert `id` ends in `into`, whose weights become the mean of both, in proportion to their traffic."""

    id: int
    into: int
    share: float
    """Of `into` in the mean, from 0 to 1."""
    why: Mapping[str, float]


@dataclass(frozen=True)
class Prune:
    """Expert `id` ends, and its tokens go to others."""

    id: int
    why: Mapping[str, float]


Plan: TypeAlias = Grow | Merge | Prune


def free_logical_id(roster: ExpertRoster, placement: ExpertPlacement) -> int | None:
    """The vacant seat on the rank that has the fewest living experts, ties to the lowest rank and seat; None if full.

    Seats have one place each.
    """
    rank_of_logical = [placement.owner(logical_id).rank for logical_id in range(roster.logical_experts)]
    active = np.bincount([rank_of_logical[record.logical_id] for record in roster.active], minlength=placement.ranks)
    return min(
        roster.vacant,
        key=lambda logical_id: (active[rank_of_logical[logical_id]], rank_of_logical[logical_id], logical_id),
        default=None,
    )


def plan_places(
    roster: ExpertRoster, placement: ExpertPlacement, together_SS: NDArray[np.float64] | None = None
) -> ExpertPlacement:
    """`placement` with as few exchanges of living experts for vacant seats as make the numbers of living experts per
    rank differ by one at most, or as little as the slots allow.

    Whoever moves is the one that has least to do with those it leaves and most with those it joins, by `together_SS`:
    how many tokens went to both of two seats.
    """
    slots = [list(row) for row in placement.slots]
    sits = {record.logical_id for record in roster.active}
    together_SS = np.zeros((roster.logical_experts, roster.logical_experts)) if together_SS is None else together_SS
    while True:
        active = [[logical_id for logical_id in row if logical_id in sits] for row in slots]
        room = [
            rank for rank, row in enumerate(slots) if len(active[rank]) < sum(logical_id >= 0 for logical_id in row)
        ]
        full = max(range(len(slots)), key=lambda rank: (len(active[rank]), -rank))
        if not room or len(active[full]) - len(active[least := min(room, key=lambda r: (len(active[r]), r))]) < 2:
            return ExpertPlacement(tuple(tuple(row) for row in slots))
        loss = together_SS[:, active[full]].sum(1) - together_SS[:, active[least]].sum(1)
        moves = min(active[full], key=lambda logical_id: (loss[logical_id], -logical_id))
        leaves = slots[full].index(moves)
        enters = next(
            slot for slot, logical_id in enumerate(slots[least]) if logical_id >= 0 and logical_id not in sits
        )
        slots[full][leaves], slots[least][enters] = slots[least][enters], slots[full][leaves]


def plan_growth(
    roster: ExpertRoster, placement: ExpertPlacement, uncovered: Mapping[int, float], *, fresh: bool = False
) -> Grow | None:
    """Halve the living expert with the greatest `uncovered` weight (by id: how many tokens that the model gets wrong
    it is responsible for), ties to the lowest id; None where no seat is free or nothing is uncovered."""
    logical_id = free_logical_id(roster, placement)
    active = {record.id: uncovered.get(record.id, 0.0) for record in roster.active}
    parent = max(active, key=lambda id: (active[id], -id))
    if logical_id is None or active[parent] <= 0:
        return None
    return Grow(parent, logical_id, fresh, {"uncovered": active[parent]})


def plan_merges(
    roster: ExpertRoster,
    distance: Mapping[tuple[int, int], float],
    similarity: Mapping[tuple[int, int], float],
    traffic: Mapping[int, float],
    *,
    most_distance: float,
    least_similarity: float,
    min_experts: int,
) -> list[Merge]:
    """Pairs of living experts that became the same, closest first, each expert in one pair at most.

    By pair of ids, `distance` compares what they say (0 alike, 1 unrelated), `similarity` their aligned weights. Both
    have to agree. The one with more traffic stays, of equals the older.
    """
    close = sorted(
        (distance[a, b], a, b)
        for a, b in similarity
        if distance[a, b] <= most_distance and similarity[a, b] >= least_similarity
    )
    plans: list[Merge] = []
    paired: set[int] = set()
    for apart, a, b in close:
        if {a, b} & paired or len(roster) - len(plans) <= min_experts:
            continue
        merged_into, ends = sorted((a, b), key=lambda id: (-traffic[id], id))
        total = traffic[a] + traffic[b]
        why = {"distance": apart, "similarity": similarity[a, b]}
        plans.append(Merge(ends, merged_into, traffic[merged_into] / total if total else 0.5, why))
        paired |= {a, b}
    return plans


def plan_prunes(
    roster: ExpertRoster,
    traffic: Mapping[int, float],
    *,
    step: int,
    below: float,
    min_age: int,
    min_experts: int,
    spared: Sequence[int] = (),
) -> list[Prune]:
    """Living experts of at least `min_age` steps that got less than the fraction `below` of an even share of the
    traffic, the least used first; those of `spared` stay."""
    total = sum(traffic.values())
    if not total:
        return []
    share = {record.id: traffic.get(record.id, 0.0) * len(roster) / total for record in roster.active}
    idle = sorted(
        (share[record.id], record.id)
        for record in roster.older_than(min_age, step)
        if share[record.id] < below and record.id not in spared
    )
    allowed = max(0, len(roster) - min_experts)
    return [Prune(id, {"share_of_even": used}) for used, id in idle[:allowed]]
