"""Copies of hot experts in spare slots, in the manner of EPLB (DeepSeek's expert parallelism load balancer)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from toolkit.moe.placement import ExpertPlacement
from toolkit.moe.planners.board import LITTLE_GAIN, Board, capacities, even_counts, pack, settle
from toolkit.moe.planners.registry import Load, checked_load, register_planner

CLOSE = 1.01
"""An imbalance after packing at which no other division of spare slots is tried."""


def copies_for(weights: Sequence[float], spare: int, most: int, *, at_once: int = 1, hot: float = 0.0) -> list[int]:
    """Copies per expert: each of `spare` slots goes to the expert whose copies bear most, up to `most` copies each.

    No other way of giving out the slots makes the heaviest copy lighter. With `at_once`, experts whose copies bear no
    more than `hot` get so many slots at a time: fewer experts, in finer parts. Experts without load get one copy.
    """
    copies = [1] * len(weights)
    heap = [(-weight, expert) for expert, weight in enumerate(weights) if weight > 0 and most > 1]
    heapq.heapify(heap)
    while spare and heap:
        weight, expert = heapq.heappop(heap)
        given = min(1 if -weight > hot else at_once, spare, most - copies[expert])
        copies[expert] += given
        spare -= given
        if copies[expert] < most:
            heapq.heappush(heap, (-weights[expert] / copies[expert], expert))
    return copies


def _pack_with_copies(weights: Sequence[float], room: Sequence[int], spare: int) -> list[list[int]]:
    """The best packing among four ways to divide spare slots. Halves of alike experts often leave no even packing
    where thirds do."""
    mean = sum(weights) / len(room)
    best, lowest = [], float("inf")
    for at_once in (1, 2, 3, 4):
        copies = copies_for(weights, spare, sum(limit > 0 for limit in room), at_once=at_once, hot=0.9 * mean)
        packed = pack(weights, room, copies)
        highest = max(sum(weights[item] / copies[item] for item in items) for items in packed)
        if highest < lowest:
            best, lowest = packed, highest
        if lowest <= CLOSE * mean:
            break
    return best


@register_planner("replicate")
def replicate(
    load_E: Load,
    current: ExpertPlacement,
    *,
    node_of_rank: Sequence[int] | None = None,
    group_size: int = 1,
    max_replicas: int | None = None,
) -> ExpertPlacement:
    """From scratch: spare slots go to the hottest experts, copies are packed by the load each bears, and levelled.

    With `node_of_rank`, first groups of `group_size` consecutive experts are packed on nodes, then experts are
    replicated within their node, so that a router that is limited to a few groups reaches few nodes. `max_replicas`
    bounds the copies beyond the first, over all experts; default, every spare slot is used.
    """
    load = checked_load(load_E, current)
    room = capacities(current)
    experts_R: list[list[int]] = [[] for _ in room]
    spare = sum(room) - current.num_experts
    share = 1.0 if max_replicas is None or not spare else min(1.0, max_replicas / spare)
    nodes = _by_node(node_of_rank, len(room))
    for ranks, experts in zip(nodes, _experts_of_nodes(load.tolist(), nodes, room, group_size), strict=True):
        weights = [float(load[e]) for e in experts]
        room_here = [room[rank] for rank in ranks]
        spare_here = int((sum(room_here) - len(experts)) * share)
        for rank, items in zip(ranks, _pack_with_copies(weights, room_here, spare_here), strict=True):
            experts_R[rank] = [experts[item] for item in items]
    board = Board(settle(experts_R, current), load)
    board.level(min_gain=LITTLE_GAIN, node_of_rank=None if node_of_rank is None else np.asarray(node_of_rank))
    return board.placement()


def _by_node(node_of_rank: Sequence[int] | None, ranks: int) -> list[list[int]]:
    """The ranks of each node; all of one node where no map is given."""
    if node_of_rank is None:
        return [list(range(ranks))]
    if len(node_of_rank) != ranks:
        raise ValueError(f"node_of_rank names {len(node_of_rank)} rank(s), the placement has {ranks}")
    return [[r for r in range(ranks) if node_of_rank[r] == node] for node in sorted(set(node_of_rank))]


def _experts_of_nodes(
    weights: Sequence[float], nodes: list[list[int]], room: Sequence[int], group_size: int
) -> list[list[int]]:
    """The experts of each node, by id: groups of consecutive ones, packed by their load."""
    if group_size < 1 or len(weights) % group_size:
        raise ValueError(f"group_size {group_size} does not divide {len(weights)} experts")
    groups = [sum(weights[first : first + group_size]) for first in range(0, len(weights), group_size)]
    limits = even_counts(len(groups), [sum(room[rank] for rank in ranks) // group_size for ranks in nodes])
    return [
        [group * group_size + place for group in sorted(packed) for place in range(group_size)]
        for packed in pack(groups, limits)
    ]
