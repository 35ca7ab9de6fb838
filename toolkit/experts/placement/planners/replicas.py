"""Replicas of hot experts in spare slots, as in EPLB (DeepSeek's expert parallelism load balancer)."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections import Counter
from collections.abc import Sequence

from toolkit.experts.placement.loads import Load, checked_load
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.planners.packing import LITTLE_GAIN, PackingState, as_even, pack, settle
from toolkit.experts.placement.planners.registry import register_planner

CLOSE = 1.004
"""Imbalance after packing below which no other division of spare slots is tried."""
SLACKS = (1.002, 1.008, 1.015, 1.025, 1.04, 1.07)
"""Load limits to try, as multiples of the lower bound of the busiest rank's load."""


def replicas_for(weights: Sequence[float], spare: int, most: int) -> list[int]:
    """Return replicas per expert: each of `spare` slots goes to the expert whose replicas have the most load, up to
    `most` each. No other division of the slots makes the busiest replica lighter. Experts without load get one."""
    replicas = [1] * len(weights)
    heap = [(-weight, expert) for expert, weight in enumerate(weights) if weight > 0 and most > 1]
    heapq.heapify(heap)
    while spare and heap:
        _, expert = heapq.heappop(heap)
        replicas[expert] += 1
        spare -= 1
        if replicas[expert] < most:
            heapq.heappush(heap, (-weights[expert] / replicas[expert], expert))
    return replicas


def _fill(weights: Sequence[float], room: Sequence[int], spare: int, limit: float) -> list[list[int]]:
    """The items of each rank, none of which should be loaded above `limit`.

    Items above it are divided first. Of the others, heaviest first, each goes whole to the rank with the least load, if
    it fits there. Those that fit nowhere are then divided into as few replicas as fit into the ranks with least load.
    """
    bins: list[list[int]] = [[] for _ in room]
    loads = [0.0 if places else float("inf") for places in room]
    least = [(0.0, rank) for rank, places in enumerate(room) if places]  # ascending
    order = sorted(range(len(weights)), key=lambda item: (-weights[item], item))
    left_over = []

    def give(item: int, replicas: int) -> None:
        part = weights[item] / replicas
        taken = least[:replicas]
        del least[:replicas]
        for _, rank in taken:
            bins[rank].append(item)
            loads[rank] += part
            if len(bins[rank]) < room[rank]:
                insort(least, (loads[rank], rank))

    def fewest_replicas(weight: float) -> int:
        """The fewest that keep to the limit, or come closest to it."""
        best = 1
        lowest = float("inf")
        for replicas, (load, _) in enumerate(itertools.islice(least, spare + 1), start=1):
            if load + weight / replicas < lowest:
                best = replicas
                lowest = load + weight / replicas
            if lowest <= limit or load >= lowest:  # ranks with more load cannot come closer
                break
        return best

    for item in order:
        if weights[item] > limit:
            replicas = fewest_replicas(weights[item])
            spare -= replicas - 1
            give(item, replicas)
        elif weights[item] and least[0][0] + weights[item] <= limit:
            give(item, 1)
        else:
            left_over.append(item)
    for item in left_over:
        replicas = fewest_replicas(weights[item]) if weights[item] else 1
        spare -= replicas - 1
        give(item, replicas)
    return bins


def _pack_with_replicas(weights: Sequence[float], room: Sequence[int], spare: int) -> list[list[int]]:
    """Return the best packing found. First all spare slots go to the hottest experts, which suits loads that differ
    much. Then limits are tried, each with the replicas that it needs, which suits similar loads."""
    mean = sum(weights) / len(room)
    most = sum(places > 0 for places in room)
    replicas = replicas_for(weights, spare, most)
    target = max(mean, max(w / n for w, n in zip(weights, replicas, strict=True)))
    best = pack(weights, room, replicas)
    lowest = _highest(best, weights)
    for slack in SLACKS:
        if lowest <= max(CLOSE, slack) * target:
            break
        filled = _fill(weights, room, spare, slack * target)
        highest = _highest(filled, weights)
        if highest < lowest:
            best, lowest = filled, highest
    return best


def _highest(bins: Sequence[Sequence[int]], weights: Sequence[float]) -> float:
    replicas = Counter(item for items in bins for item in items)
    return max(sum(weights[item] / replicas[item] for item in items) for items in bins)


@register_planner("replicate")
def replicate(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Plan from scratch: spare slots go to the hottest experts, replicas are packed by their load, then exchanged.

    Returns:
        The plan, or `current` if the plan is not more even.
    """
    load = checked_load(load_E, current)
    room = current.slots_per_rank
    spare = sum(room) - current.num_experts
    experts_P = _pack_with_replicas(load.tolist(), room, spare)
    packing = PackingState(settle(experts_P, current), load)
    packing.level(min_gain=LITTLE_GAIN)
    return current if as_even(current, packing, load) else packing.placement()
