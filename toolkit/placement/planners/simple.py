"""Planners of one idea each. All but `swap` and `few_swaps` begin from scratch, with one copy of every expert."""

from __future__ import annotations

from toolkit.parallel.ownership import EMPTY_ROW
from toolkit.placement.loads import Floats, Load, checked_load
from toolkit.placement.placement import ExpertPlacement
from toolkit.placement.planners.exact import SearchTooLong, fit
from toolkit.placement.planners.fewest import fewest_exchanges, worthwhile_exchanges
from toolkit.placement.planners.packing import LITTLE_GAIN, PackingState, as_even, balanced, even_counts, pack, settle
from toolkit.placement.planners.registry import register_planner

FEW, BISECTIONS, NODES = 32, 6, 600
"""Up to so many experts, `lpt` searches: so many times for a limit, through so many placements of a part of them. One
to ten milliseconds."""
OTHERS_GAIN = 0.8
"""What an exchange between ranks that are not the busiest must gain, as a part of the mean load of an expert."""


@register_planner("contiguous")
def contiguous(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Consecutive blocks, whatever the load: what others do, for comparison."""
    checked_load(load_E, current)
    ids = iter(range(current.num_experts))
    counts = even_counts(current.num_experts, current.slots_per_rank)
    return settle([[next(ids) for _ in range(count)] for count in counts], current)


@register_planner("round_robin")
def round_robin(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Dealt out like cards, whatever the load: neighbouring ids, often alike, get different ranks."""
    checked_load(load_E, current)
    counts = even_counts(current.num_experts, current.slots_per_rank)
    rounds = range(max(counts))
    order = [rank for turn in rounds for rank, count in enumerate(counts) if turn < count]
    experts_R: list[list[int]] = [[] for _ in counts]
    for expert, rank in enumerate(order):
        experts_R[rank].append(expert)
    return settle(experts_R, current)


@register_planner("lpt")
def lpt(load_E: Load, current: ExpertPlacement, *, level: bool = True) -> ExpertPlacement:
    """Longest processing time first: the heaviest expert that is left goes to the rank with the least load and a free
    slot (Graham 1969). Moves nearly every expert. With `level`, exchanges follow until none lowers the busiest rank;
    a few experts are then placed by a short search, where that finds better. `current`, where it is as even already
    and has no replicas."""
    load = checked_load(load_E, current)
    packing = (
        balanced(load, current)
        if level
        else PackingState(settle(pack(load.tolist(), current.slots_per_rank), current), load)
    )
    if level and len(load) <= FEW:
        packing = _searched(packing, load, current)
    return current if not current.has_replicas and as_even(current, packing, load) else packing.placement()


def _searched(packing: PackingState, load: Floats, current: ExpertPlacement) -> PackingState:
    """The most even placement that a bisection of short searches finds; `packing` where it finds none that is better."""
    mean = float(load.sum()) / current.ranks
    low, high = max(mean, float(load.max())), packing.imbalance * mean
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
    load_E: Load,
    current: ExpertPlacement,
    *,
    target: float = 1.0,
    tolerance: float = 0.01,
    max_moves: int | None = None,
) -> ExpertPlacement:
    """The few exchanges that help most, from where experts are now: never worse than `current`, replicas kept.

    A few experts without replicas: as few exchanges as a search finds to come within `tolerance` of the imbalance of
    `lpt`, and `lpt`'s own plan where it finds none. Many: the best exchange, again and again, until one would lower the
    imbalance by no more than half of `tolerance`; where the busiest rank cannot be helped, the others are levelled
    among themselves, as one of them may be busiest next. A larger `tolerance` moves fewer experts.

    Ends early at an imbalance of `target`, or when `max_moves` experts have moved (an exchange of two experts moves
    two, a move into a spare slot one).
    """
    load = checked_load(load_E, current)
    packing = PackingState(current, load)
    if len(load) <= FEW and not packing.has_replicas and load.any():
        scratch = lpt(load, current)
        like = PackingState(scratch, load)
        return fewest_exchanges(packing, like, tolerance=tolerance, target=target, max_moves=max_moves) or scratch
    others_gain = OTHERS_GAIN * current.ranks / current.num_experts
    packing.level(target=target, min_gain=tolerance / 2, others_gain=others_gain, max_moves=max_moves)
    return packing.placement()


@register_planner("few_swaps")
def few_swaps(
    load_E: Load,
    current: ExpertPlacement,
    *,
    target: float = 1.0,
    gain: float = 0.01,
    max_moves: int | None = None,
) -> ExpertPlacement:
    """As `swap`, but only exchanges that gain at least `gain`, a part of a rank's mean load, and do not follow noise.

    Where loads change from window to window, about as even in the windows that come as `lpt`, whose plans are closer to
    the window that they were made for.
    """
    load = checked_load(load_E, current)
    if len(load) <= FEW and not current.has_replicas and load.any():
        return worthwhile_exchanges(PackingState(current, load), gain=gain, target=target, max_moves=max_moves)
    return swap(load, current, target=target, tolerance=2 * gain, max_moves=max_moves)


def place_new_expert(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """`current` with one expert more, under the next id, on the rank with a spare slot that has fewest experts; ties go
    to the least load, then to the lowest rank. Raises ValueError where no slot is spare."""
    load_R = PackingState(current, checked_load(load_E, current)).load_R
    spare = [rank for rank, row in enumerate(current.slots) if EMPTY_ROW in row]
    if not spare:
        raise ValueError(f"no rank has a spare slot for expert {current.num_experts}")
    experts_R = [len(row) - row.count(EMPTY_ROW) for row in current.slots]
    rank = min(spare, key=lambda r: (experts_R[r], load_R[r], r))
    row = list(current.slots[rank])
    row[row.index(EMPTY_ROW)] = current.num_experts
    return ExpertPlacement((*current.slots[:rank], tuple(row), *current.slots[rank + 1 :]))
