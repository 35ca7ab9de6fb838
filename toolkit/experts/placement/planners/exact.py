"""Branch and bound over the placements of a few experts: finds one within a load limit or proves that there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

ROUNDING = 1e-9


class SearchTooLong(Exception):
    """The search visited all nodes it was allowed and did not decide."""


def fit(
    weights: Sequence[float], room: Sequence[int], limit: float, *, spare: int, nodes: int
) -> list[list[int]] | None:
    """Returns the items of each rank, none loaded above `limit`; None where no placement achieves that.

    Items may have `spare` replicas in all beyond the first of each; replicas are on different ranks and share the
    weight equally. Raises SearchTooLong after `nodes` partial placements.
    """
    most = limit * (1 + ROUNDING)
    order = sorted(range(len(weights)), key=lambda item: (-weights[item], item))
    if len(order) > sum(room):
        return None
    left_after = [0.0]
    for item in reversed(order):
        left_after.append(left_after[-1] + weights[item])
    left_after.reverse()
    bins: list[list[int]] = [[] for _ in room]
    loads = [0.0] * len(room)
    free = list(room)
    visited = 0

    def extend(place: int, fewest: int, spare: int) -> bool:
        """Place the items from `place` on, the first of them with at least `fewest` replicas."""
        nonlocal visited
        visited += 1
        if visited > nodes:
            raise SearchTooLong
        if place == len(order):
            return True
        item = order[place]
        weight = weights[item]
        # A rank can take at most its free slots times the heaviest remaining weight.
        takes = sum(min(most - load, slots * weight) for load, slots in zip(loads, free, strict=True))
        if takes < left_after[place] * (1 - ROUNDING):
            return False
        open_ranks = sorted(
            (rank for rank, slots in enumerate(free) if slots), key=lambda rank: (loads[rank], free[rank], rank)
        )
        # Items of equal weight are interchangeable: the later one gets no fewer replicas.
        alike = place + 1 < len(order) and weights[order[place + 1]] == weight
        for replicas in range(fewest, 1 + (min(len(open_ranks), spare + 1) if weight else 1)):
            part = weight / replicas
            fitting = [rank for rank in open_ranks if loads[rank] + part <= most]
            for ranks in _choices(fitting, replicas, loads, free):
                before = [loads[rank] for rank in ranks]
                for rank in ranks:
                    loads[rank] += part
                    free[rank] -= 1
                    bins[rank].append(item)
                if extend(place + 1, replicas if alike else 1, spare - replicas + 1):
                    return True
                for rank, load in zip(ranks, before, strict=True):
                    loads[rank] = load
                    free[rank] += 1
                    bins[rank].pop()
        return False

    return bins if extend(0, 1, min(spare, sum(room) - len(order))) else None


def _choices(
    ranks: Sequence[int], number: int, loads: Sequence[float], free: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Ways to take `number` of `ranks`, which are sorted; ranks with equal load and free slots are interchangeable."""
    if number == 1:
        kinds = {(loads[rank], free[rank]): rank for rank in reversed(ranks)}
        yield from ((rank,) for rank in reversed(kinds.values()))
        return
    alike = [list(group) for _, group in groupby(ranks, key=lambda rank: (loads[rank], free[rank]))]
    behind = [0]
    for group in reversed(alike):
        behind.append(behind[-1] + len(group))
    behind.reverse()

    def choose(place: int, left: int) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        elif left <= behind[place]:
            group = alike[place]
            for taken in range(min(left, len(group)), -1, -1):
                for others in choose(place + 1, left - taken):
                    yield (*group[:taken], *others)

    # The caller changes loads and free slots while it tries a choice, and restores them: the groups stay valid.
    yield from choose(0, number)
