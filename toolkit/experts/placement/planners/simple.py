"""The simple planners. All but `swap` and `few_swaps` plan from scratch, without replicas."""

from __future__ import annotations

from toolkit.experts.placement.loads import Floats, Load, checked_load
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.planners.exact import SearchTooLong, fit
from toolkit.experts.placement.planners.fewest import fewest_exchanges, worthwhile_exchanges
from toolkit.experts.placement.planners.packing import (
    LITTLE_GAIN,
    PackingState,
    as_even,
    even_counts,
    pack,
    settle,
)
from toolkit.experts.placement.planners.registry import register_planner

FEW, BISECTIONS, NODES = 32, 6, 600
"""`lpt` searches for up to FEW experts: BISECTIONS limits, each through at most NODES partial placements. One to ten
milliseconds."""
OTHERS_GAIN = 0.8
"""Least gain of an exchange between ranks that are not the busiest, as a fraction of the mean load of an expert."""


@register_planner("contiguous")
def contiguous(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Plans consecutive blocks; ignores the load. The default of other libraries, for comparison."""
    checked_load(load_E, current)
    ids = iter(range(current.num_experts))
    counts = even_counts(current.num_experts, current.slots_per_rank)
    return settle([[next(ids) for _ in range(count)] for count in counts], current)


@register_planner("round_robin")
def round_robin(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Plans expert e on rank e modulo ranks, as far as slots allow; ignores the load."""
    checked_load(load_E, current)
    counts = even_counts(current.num_experts, current.slots_per_rank)
    rounds = range(max(counts))
    order = [rank for turn in rounds for rank, count in enumerate(counts) if turn < count]
    experts_R: list[list[int]] = [[] for _ in counts]
    for expert, rank in enumerate(order):
        experts_R[rank].append(expert)
    return settle(experts_R, current)


@register_planner("lpt")
def lpt(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Plans by longest processing time first (Graham 1969), which moves nearly every expert.

    The heaviest remaining expert goes to the rank with the least load and a free slot. Exchanges follow until none
    lowers the busiest rank. Up to FEW experts are then placed by a short search, where it finds a better placement.

    Returns:
        The plan, or `current` where it is as even already and has no replicas.
    """
    load = checked_load(load_E, current)
    packing = PackingState(settle(pack(load.tolist(), current.slots_per_rank), current), load)
    packing.level(min_gain=LITTLE_GAIN)
    if len(load) <= FEW:
        packing = _searched(packing, load, current)
    return current if not current.has_replicas and as_even(current, packing, load) else packing.placement()


def _searched(packing: PackingState, load: Floats, current: ExpertPlacement) -> PackingState:
    """Returns the most even placement found by bisection over load limits; `packing` where none is better."""
    mean = float(load.sum()) / current.ranks
    low = max(mean, float(load.max()))
    high = packing.imbalance * mean
    for _ in range(BISECTIONS):
        if high <= low * (1 + LITTLE_GAIN):
            break
        limit = (low + high) / 2
        try:
            found = fit(load.tolist(), current.slots_per_rank, limit, spare=0, nodes=NODES)
        except SearchTooLong:
            found = None
        if found is None:
            low = limit
        else:
            packing = PackingState(settle(found, current), load)
            high = packing.imbalance * mean
    return packing


@register_planner("swap")
def swap(
    load_E: Load, current: ExpertPlacement, *, tolerance: float = 0.01, max_moves: int | None = None
) -> ExpertPlacement:
    """Plans the few exchanges that gain most, starting from `current`: never worse than it, replicas are kept.

    Up to FEW experts without replicas: the fewest exchanges found by a search that come within `tolerance` of the
    imbalance of `lpt`, and the plan of `lpt` where none are found. Otherwise: the best exchange, repeated until it
    would lower the imbalance by no more than half of `tolerance`. Where nothing lowers the busiest rank, exchanges
    continue among the other ranks, because one of them may be the busiest next.

    Args:
        load_E: The load of each expert.
        current: The placement now.
        tolerance: See above; a larger one moves fewer experts.
        max_moves: The experts that may move; an exchange of two moves two, a move into a spare slot one. None: any.
    """
    load = checked_load(load_E, current)
    packing = PackingState(current, load)
    if len(load) <= FEW and not packing.has_replicas and load.any():
        scratch = lpt(load, current)
        like = PackingState(scratch, load)
        return fewest_exchanges(packing, like, tolerance=tolerance, max_moves=max_moves) or scratch
    others_gain = OTHERS_GAIN * current.ranks / current.num_experts
    packing.level(min_gain=tolerance / 2, others_gain=others_gain, max_moves=max_moves)
    return packing.placement()


@register_planner("few_swaps")
def few_swaps(load_E: Load, current: ExpertPlacement, *, gain: float = 0.01) -> ExpertPlacement:
    """Does as `swap` does, but only exchanges that gain at least `gain`, a fraction of a rank's mean load.

    Less even than `lpt` on the window that it plans for. Where loads change from window to window, it matches `lpt` on
    the next window.
    """
    load = checked_load(load_E, current)
    if len(load) <= FEW and not current.has_replicas and load.any():
        return worthwhile_exchanges(PackingState(current, load), gain=gain)
    return swap(load, current, tolerance=2 * gain)
