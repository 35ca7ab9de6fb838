"""Planners without replicas of their own: all but `swap` plan from scratch."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.experts.placement.loads import Load, checked_load
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.planners.packing import (
    LITTLE_GAIN,
    PackingState,
    as_even,
    in_turns,
    pack,
    settle,
)
from toolkit.experts.placement.planners.registry import register_planner

OTHERS_GAIN = 0.8
"""Least gain of an exchange between ranks that are not the busiest, as a fraction of the mean load of an expert."""


@register_planner("contiguous")
def contiguous(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Plan consecutive blocks; ignore the load. The default of other libraries, for comparison."""
    checked_load(load_E, current)
    return _placed(sorted(in_turns(current.num_experts, current.slots_per_rank)), current)


@register_planner("round_robin")
def round_robin(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Plan expert e on rank e modulo ranks, as far as slots allow; ignore the load."""
    checked_load(load_E, current)
    return _placed(in_turns(current.num_experts, current.slots_per_rank), current)


def _placed(rank_of_expert: Sequence[int], current: ExpertPlacement) -> ExpertPlacement:
    experts_P: list[list[int]] = [[] for _ in current.slots]
    for expert, rank in enumerate(rank_of_expert):
        experts_P[rank].append(expert)
    return settle(experts_P, current)


@register_planner("lpt")
def lpt(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Plan by longest processing time first (Graham 1969), which moves nearly every expert.

    The heaviest remaining expert goes to the rank with the least load and a free slot. Exchanges follow until none
    lowers the busiest rank.

    Returns:
        The plan, or `current` if that has no replicas and the plan is not more even.
    """
    load = checked_load(load_E, current)
    packing = PackingState(settle(pack(load.tolist(), current.slots_per_rank), current), load)
    packing.level(min_gain=LITTLE_GAIN)
    return current if not current.has_replicas and as_even(current, packing, load) else packing.placement()


@register_planner("swap")
def swap(load_E: Load, current: ExpertPlacement, *, price: float = 0.02) -> ExpertPlacement:
    """Plan the few exchanges that gain most, starting from `current`. Never less even than `current`; keeps replicas.

    If no exchange lowers the busiest rank, exchanges continue among the other ranks, because one of them may be the
    busiest next.

    Args:
        load_E: The load of each expert.
        current: The placement now.
        price: How much an exchange has to lower the busiest rank's load for each expert that it moves away from its
            rank in `current`, as a fraction of a rank's mean load. A higher price moves fewer experts.
    """
    load = checked_load(load_E, current)
    packing = PackingState(current, load)
    packing.level(min_gain=LITTLE_GAIN, price=price, others_gain=OTHERS_GAIN * current.ranks / current.num_experts)
    return packing.placement()
