"""Lower bounds of the rank imbalance that any placement can reach, to compare planners with.

Letters: `T` limits, `E` experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.placement.loads import Floats, Load, checked_load
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.planners.exact import SearchTooLong, fit
from toolkit.experts.placement.planners.replicas import replicas_for

STEP = 0.0025
"""Relative resolution of the search for a bound."""
MOST_PARTS = 16
"""Largest k of the dual feasible functions in `_bound_by_counting`."""
ALIKE = (1.0, 1.01, 1.03)
"""Ratios to which loads are rounded down. Coarser is faster, because equal experts are interchangeable; the bound stays
valid, because a bound for a smaller load holds for a larger one."""


def lower_bound(load_E: Load, placement: ExpertPlacement, *, replicas: bool = False, search: int = 0) -> float:
    """Returns the rank imbalance below which no placement of the experts in the slots of `placement` can get.

    With `replicas`, spare slots may hold replicas, which share their expert's load equally; without, each expert is
    placed once. The bound is not always attainable. For few experts on few ranks `search` tightens it: a branch and
    bound that visits at most so many partial placements, several times; 20,000 take up to a second.
    """
    load = checked_load(load_E, placement)
    if not load.any():
        return 1.0
    room = np.sort(placement.slots_per_rank)
    mean = float(load.sum()) / len(room)
    if replicas:
        replicas_E = replicas_for(load.tolist(), int(room.sum()) - len(load), int((room > 0).sum()))
        bound = float((load / replicas_E).max())
    else:
        bound = _bound_without_replicas(load, room)
    bound = max(bound, mean)
    if search:
        bound = _searched(bound, load, room, int(room.sum()) - len(load) if replicas else 0, search)
    return bound / mean


def _searched(bound: float, load: Floats, room: NDArray[np.int64], spare: int, nodes: int) -> float:
    """The highest load per rank that a search proved impossible to stay under, at least `bound`."""

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
    """A lower bound of the load of the busiest rank. `room`: slots per rank, ascending.

    For each k, look at the k heaviest experts. Either they are on k different ranks: these also hold the experts for
    which the other ranks have no slots, and the busiest of the k has at least the mean of all that. Or two of them are
    on one rank, which has at least the two lightest of the k, and the experts that must fill its slots.
    """
    experts = len(load)
    ranks = len(room)
    heavy = np.sort(load)[::-1]
    heaviest = np.concatenate([[0.0], heavy.cumsum()])
    lightest = np.concatenate([[0.0], heavy[::-1].cumsum()])
    least_held = max(0, experts - int(room[1:].sum()))
    best = 0.0
    for k in range(1, min(experts, ranks + 1) + 1):
        pair = heavy[k - 2] + heavy[k - 1] + lightest[max(0, least_held - 2)] if k > 1 else np.inf
        if k <= ranks:
            # The ranks without any of the k hold as many of the other experts as they have slots.
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
    """A higher `bound` where experts, which are indivisible, leave gaps on every rank, by dual feasible functions
    (Fekete and Schepers, 2001): experts that fit together under a limit T have sizes floor((k + 1) load / T) / k that
    sum to at most 1, for any k.
    """
    limits_T = bound * (1 + STEP * np.arange(1, 200))
    for k in range(1, MOST_PARTS + 1):
        scaled_TE = (k + 1) * load / limits_T[:, None]
        whole_TE = np.floor(scaled_TE + 1e-9)
        # A load that is a whole number of parts is not rounded.
        sizes_TE = np.where(np.abs(scaled_TE - whole_TE) <= 1e-9, scaled_TE / (k + 1), whole_TE / k)
        impossible = np.flatnonzero(sizes_TE.sum(1) > ranks * (1 + 1e-9))
        if len(impossible):
            bound = max(bound, float(limits_T[impossible[-1]]))
    return bound
