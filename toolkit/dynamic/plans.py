"""Decisions about a layer's experts, as pure functions of measurements.

Each decision is a plan on uids (Grow, Merge, Prune) with its reason. All ranks measure the same numbers, so all make
the same plans; `toolkit.dynamic.surgery` executes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from toolkit.dynamic.roster import ExpertRoster
from toolkit.experts.placement.placement import ExpertPlacement

Pair: TypeAlias = tuple[int, int]
"""uids of two experts, the lower one first."""


@dataclass(frozen=True)
class Grow:
    """A new expert for part of the tokens of `parent`, with its weights."""

    parent: int
    """uid."""
    logical_id: int
    """The logical id of the new expert."""
    why: Mapping[str, float]


@dataclass(frozen=True)
class Merge:
    """Expert `uid` is merged into expert `into`, whose weights become the mean of both, weighted by their load."""

    uid: int
    into: int
    share: float
    """The weight of `into` in the mean, from 0 to 1."""
    why: Mapping[str, float]


@dataclass(frozen=True)
class Prune:
    """Expert `uid` is removed; its tokens go to other experts."""

    uid: int
    why: Mapping[str, float]


Plan: TypeAlias = Grow | Merge | Prune


def plan_sleep(active: int, initial: int, *, every: int, least: int | None) -> int:
    """Return the optimizer steps until the next sleep phase.

    They are `every`, or with a `least` number of steps `every` / max(1, growth / 2), with growth = `active` / `initial`
    experts: a layer with more than twice the initial number sleeps more often, but not after fewer than `least` steps.
    """
    return every if least is None else min(every, round(max(least, every / max(1.0, active / initial / 2))))


def free_logical_id(roster: ExpertRoster, placement: ExpertPlacement) -> int | None:
    """Return the inactive logical expert on the rank with the fewest active experts, ties to the lowest rank and id;
    None if all are active. `placement` has one slot for each logical expert."""
    rank_of = [placement.owner(logical_id).rank for logical_id in range(roster.logical_experts)]
    active = np.bincount([rank_of[record.logical_id] for record in roster.active], minlength=placement.ranks)
    return min(roster.inactive, key=lambda e: (active[rank_of[e]], rank_of[e], e), default=None)


def plan_placement(
    roster: ExpertRoster, placement: ExpertPlacement, together_EE: NDArray[np.float64] | None = None
) -> ExpertPlacement:
    """Balance the number of active experts per rank: counts differ by at most one, or as little as the slots allow.

    Swaps the minimum number of active experts with inactive ones. The expert that moves shares the fewest tokens with
    the experts of its rank and the most with the experts of its new rank.

    Args:
        roster: The layer's experts.
        placement: Current placement, with one slot for each logical expert.
        together_EE: Tokens routed to both of two logical experts. None: affinity is ignored.
    """
    slots = [list(row) for row in placement.slots]
    active = {record.logical_id for record in roster.active}
    if together_EE is None:
        together_EE = np.zeros((roster.logical_experts, roster.logical_experts))
    while True:
        held = [[e for e in row if e in active] for row in slots]
        room = [rank for rank, row in enumerate(slots) if len(held[rank]) < sum(e >= 0 for e in row)]
        fullest = max(range(len(slots)), key=lambda rank: (len(held[rank]), -rank))
        emptiest = min(room, key=lambda rank: (len(held[rank]), rank), default=fullest)
        if len(held[fullest]) - len(held[emptiest]) < 2:
            return ExpertPlacement(tuple(tuple(row) for row in slots))
        loss_E = together_EE[:, held[fullest]].sum(1) - together_EE[:, held[emptiest]].sum(1)
        mover = min(held[fullest], key=lambda e: (loss_E[e], -e))
        old = slots[fullest].index(mover)
        new = next(slot for slot, e in enumerate(slots[emptiest]) if e >= 0 and e not in active)
        slots[fullest][old], slots[emptiest][new] = slots[emptiest][new], slots[fullest][old]


def plan_growth(roster: ExpertRoster, placement: ExpertPlacement, uncovered: Mapping[int, float]) -> Grow | None:
    """Plan to split the active expert with the most uncovered routing weight, ties to the lowest uid.

    Args:
        roster: The layer's experts.
        placement: Current placement.
        uncovered: Routing weight of each expert for tokens of uncovered samples, by uid.

    Returns:
        The plan, or None if all logical experts are active or nothing is uncovered.
    """
    logical_id = free_logical_id(roster, placement)
    active = {record.uid: uncovered.get(record.uid, 0.0) for record in roster.active}
    parent = max(active, key=lambda uid: (active[uid], -uid))
    if logical_id is None or active[parent] <= 0:
        return None
    return Grow(parent, logical_id, {"uncovered": active[parent]})


def plan_merges(
    roster: ExpertRoster,
    distance: Mapping[Pair, float],
    similarity: Mapping[Pair, float],
    load: Mapping[int, float],
    *,
    max_distance: float,
    min_similarity: float,
    min_experts: int,
) -> list[Merge]:
    """Plan to merge pairs of active experts with similar outputs, closest first, each in at most one pair.

    The expert with the higher load remains, in a tie the older expert.

    Args:
        roster: The layer's experts.
        distance: By pair, how far outputs are apart: 0 for the same, 1 for unrelated ones.
        similarity: By pair, how similar aligned weights are, for the pairs that may be merged.
        load: By uid, the assignments of each expert.
        max_distance: The largest distance of a pair that is merged.
        min_similarity: The smallest similarity of a pair that is merged.
        min_experts: So many experts remain at least.
    """
    close = sorted(
        (distance[pair], *pair)
        for pair in similarity
        if distance[pair] <= max_distance and similarity[pair] >= min_similarity
    )
    plans: list[Merge] = []
    paired: set[int] = set()
    for apart, a, b in close:
        if {a, b} & paired or len(roster) - len(plans) <= min_experts:
            continue
        remains, removed = sorted((a, b), key=lambda uid: (-load[uid], uid))
        total = load[a] + load[b]
        why = {"distance": apart, "similarity": similarity[a, b]}
        plans.append(Merge(removed, remains, load[remains] / total if total else 0.5, why))
        paired |= {a, b}
    return plans


def plan_prunes(
    roster: ExpertRoster,
    load: Mapping[int, float],
    *,
    step: int,
    below: float,
    min_age: int,
    min_experts: int,
    excluded: Collection[int] = (),
) -> list[Prune]:
    """Plan to prune active experts that are hardly used, lowest load first.

    Args:
        roster: The layer's experts.
        load: By uid, the assignments of each expert.
        step: The optimizer steps done so far.
        below: Experts with less than this fraction of the mean load are pruned.
        min_age: Experts that are younger, in steps, are left.
        min_experts: So many experts remain at least.
        excluded: uids of experts that are left.
    """
    total = sum(load.values())
    if not total:
        return []
    relative = {record.uid: load.get(record.uid, 0.0) * len(roster) / total for record in roster.active}
    idle = sorted(
        (relative[record.uid], record.uid)
        for record in roster.older_than(min_age, step)
        if relative[record.uid] < below and record.uid not in excluded
    )
    allowed = max(0, len(roster) - min_experts)
    return [Prune(uid, {"load_over_mean": load_over_mean}) for load_over_mean, uid in idle[:allowed]]
