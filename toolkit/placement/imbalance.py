"""How even the load is, and how even it could be. The same functions serve live counters and replayed traces.

Letters: `E` experts, `R` ranks. A load is a number of routed copies, over any window of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.placement.placement import ExpertPlacement
from toolkit.placement.planners.exact import SearchTooLong, fit
from toolkit.placement.planners.packing import Floats
from toolkit.placement.planners.registry import Load, as_floats, checked_load
from toolkit.placement.planners.replicas import replicas_for

STEP = 0.0025
"""How finely bounds are searched for, as a part of them."""
MOST_PARTS = 16
"""Into how many parts of a rank experts are sorted."""
ALIKE = (1.0, 1.01, 1.03)
"""Ratios of the steps to which loads are rounded down: the search is shorter where experts are alike, and a bound for
less load is one for more."""


def shares(placement: ExpertPlacement) -> Floats:
    """(E, R): the part of each expert's load that each rank bears, where copies share equally."""
    share_ER = np.zeros((placement.num_experts, placement.ranks))
    for expert in range(placement.num_experts):
        places = placement.replicas(expert)
        share_ER[expert, [place.rank for place in places]] = 1 / len(places)
    return share_ER


def max_over_mean(load: NDArray[Any]) -> Floats:
    """I = max / mean over the last axis (at least 1; 1 where there is no load), one for each step or layer: take means
    over those afterwards, never of the loads before."""
    mean = np.asarray(load.mean(-1), dtype=np.float64)
    return np.divide(load.max(-1), mean, out=np.ones_like(mean), where=mean > 0)


def rank_imbalance(load_E: Load, placement: ExpertPlacement) -> float:
    """I over the ranks: how much longer the busiest one computes than if all were equal."""
    return float(max_over_mean(checked_load(load_E, placement) @ shares(placement)))


@dataclass(frozen=True)
class ExpertImbalance:
    """What the router did, wherever experts live."""

    max_violation: float
    """MaxVio: max / mean - 1."""
    variation: float
    """Standard deviation / mean."""
    entropy: float
    """Of the fractions, as a part of the most there can be: 1 when balanced, 0 when one expert gets all."""
    dead: int
    """Experts that got nothing."""


def expert_imbalance(load_E: Load) -> ExpertImbalance:
    load = as_floats(load_E)
    mean = float(load.mean())
    if not mean:
        return ExpertImbalance(0.0, 0.0, 1.0, len(load))
    fraction = load[load > 0] / load.sum()
    entropy = float(-(fraction * np.log(fraction)).sum() / np.log(len(load))) if len(load) > 1 else 1.0
    return ExpertImbalance(
        float(load.max()) / mean - 1, float(load.std()) / mean, max(0.0, entropy), int((load == 0).sum())
    )


def lower_bound(load_E: Load, placement: ExpertPlacement, *, replicas: bool = False, search: int = 0) -> float:
    """No way of placing experts in the slots that `placement` has can have a smaller rank imbalance than this.

    Without `replicas` each expert has one copy. With them, spare slots may hold copies, which share their expert's load
    equally. Not always attainable. Where few experts meet few ranks, `search` tightens it: up to so many partial
    placements are looked at, several times, to prove that no placement does better; 20,000 take up to a second.
    """
    load = checked_load(load_E, placement)
    if not load.any():
        return 1.0
    room = np.sort(placement.slots_per_rank)
    mean = float(load.sum()) / len(room)
    if replicas:
        copies = replicas_for(load.tolist(), int(room.sum()) - len(load), int((room > 0).sum()))
        bound = float((load / copies).max())
    else:
        bound = _bound_without_replicas(load, room)
    bound = max(bound, mean)
    if search:
        bound = _searched(bound, load, room, int(room.sum()) - len(load) if replicas else 0, search)
    return bound / mean


def _searched(bound: float, load: Floats, room: NDArray[np.int64], spare: int, nodes: int) -> float:
    """The highest limit that a search proved impossible to keep; `bound` where there is none above it."""

    def impossible(limit: float) -> bool:
        try:
            return fit(less.tolist(), room.tolist(), limit, spare=spare, nodes=nodes) is None
        except SearchTooLong:
            return False

    for ratio in ALIKE:
        less = load.copy()
        if ratio > 1:
            less[load > 0] = ratio ** np.floor(np.log(load[load > 0]) / np.log(ratio))
        width = STEP
        while impossible(bound * (1 + width)):
            bound *= 1 + width
            width *= 2
        while width > STEP:
            width /= 2
            if impossible(bound * (1 + width)):
                bound *= 1 + width
    return bound


def _bound_without_replicas(load: Floats, room: NDArray[np.int64]) -> float:
    """The least that the busiest rank can bear. `room` ascends.

    For each k, look at the k heaviest experts. Either they live on k ranks: these hold a number of others, because the
    other ranks have not room for all, and the busiest of the k bears at least their mean. Or two share a rank, and it
    bears at least the two lightest of them, and the others that it must hold, because its slots are needed.
    """
    experts, ranks = len(load), len(room)
    heavy = np.sort(load)[::-1]
    heaviest, lightest = np.concatenate([[0.0], heavy.cumsum()]), np.concatenate([[0.0], heavy[::-1].cumsum()])
    least_held = max(0, experts - int(room[1:].sum()))
    best = 0.0
    for k in range(1, min(experts, ranks + 1) + 1):
        pair = heavy[k - 2] + heavy[k - 1] + lightest[max(0, least_held - 2)] if k > 1 else np.inf
        if k <= ranks:
            # The ranks without any of the k take what they can, the roomiest first.
            held = max(k, experts - int(room[k:].sum()))
            apart = (heaviest[k] + lightest[held - k]) / k
        else:
            apart = np.inf
        best = max(best, min(pair, apart))
    # Of the j * ranks + 1 heaviest, some rank holds j + 1.
    for j in range(2, (experts - 1) // ranks + 1):
        last = j * ranks
        best = max(best, heaviest[last + 1] - heaviest[last - j] + lightest[max(0, least_held - j - 1)])
    return _bound_by_counting(load, int((room > 0).sum()), float(max(best, heaviest[-1] / ranks)))


def _bound_by_counting(load: Floats, ranks: int, bound: float) -> float:
    """A higher `bound` where whole experts leave gaps in every rank, by dual feasible functions (Fekete and Schepers,
    2001): experts that fit together under a limit T have sizes floor((k + 1) load / T) / k that sum to at most 1, for
    any k.
    """
    limits_T = bound * (1 + STEP * np.arange(1, 200))
    for k in range(1, MOST_PARTS + 1):
        scaled_TE = (k + 1) * load / limits_T[:, None]
        whole_TE = np.floor(scaled_TE + 1e-9)
        # A load that is a whole number of parts counts as what it is.
        sizes_TE = np.where(np.abs(scaled_TE - whole_TE) <= 1e-9, scaled_TE / (k + 1), whole_TE / k)
        impossible = np.flatnonzero(sizes_TE.sum(1) > ranks * (1 + 1e-9))
        if len(impossible):
            bound = max(bound, float(limits_T[impossible[-1]]))
    return bound
