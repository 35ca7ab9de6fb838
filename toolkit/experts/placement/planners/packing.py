"""What planners share: slots as arrays, packing, and exchanges that even out the load.

Letters: `E` experts, `R` ranks, `G` slots counted through all ranks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from toolkit.experts.placement.loads import Floats, Ints
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement
from toolkit.experts.placement.planners.exact import SearchTooLong, fit

NO_GAIN = 1e-9
"""Gains below this fraction of a load are rounding."""
LITTLE_GAIN = 1e-3
"""Least gain that planners from scratch follow, as a fraction of the mean load of a rank."""
GOOD_ENOUGH = 1.01
"""Imbalance below which no repacking is tried."""
PARTNERS, REPACK_NODES = 3, 30
"""Ranks with which the busiest one is repacked, and nodes of each search: limits that keep a plan within
milliseconds."""


class PackingState:
    """The slots of a placement while experts are exchanged. Replicas share an expert's load equally."""

    def __init__(self, placement: ExpertPlacement, load_E: Floats):
        sizes = placement.slots_per_rank
        self.expert_G: Ints = np.array(list(itertools.chain.from_iterable(placement.slots)), dtype=np.int64)
        self.rank_G: Ints = np.repeat(np.arange(len(sizes)), sizes)
        self.first_slot = np.cumsum([0, *sizes])
        held = self.expert_G != EMPTY_ROW
        replicas_E = np.bincount(self.expert_G[held], minlength=len(load_E))
        self.has_replicas = bool((replicas_E > 1).any())
        # EMPTY_ROW indexes the last element: an empty slot has weight 0, and no rank holds it.
        self.weight_G: Floats = np.append(load_E / replicas_E, 0.0)[self.expert_G]
        self.load_R: Floats = np.zeros(len(sizes))
        np.add.at(self.load_R, self.rank_G, self.weight_G)
        # Only replicas need it: an expert has one slot otherwise, which no exchange adds to.
        self.holds_RE = np.zeros((len(sizes) if self.has_replicas else 0, len(load_E) + 1), dtype=bool)
        if self.has_replicas:
            self.holds_RE[self.rank_G[held], self.expert_G[held]] = True

    @property
    def imbalance(self) -> float:
        """Busiest rank over mean; 1 where there is no load."""
        mean = float(self.load_R.mean())
        return float(self.load_R.max()) / mean if mean else 1.0

    def exchange(self, i: int, j: int) -> None:
        """Exchange what slots `i` and `j` hold."""
        p = self.rank_G[i]
        q = self.rank_G[j]
        for rank, leaving, coming in ((p, i, j), (q, j, i)):
            self.load_R[rank] += self.weight_G[coming] - self.weight_G[leaving]
        if self.has_replicas:
            self.holds_RE[[p, q], self.expert_G[[i, j]]] = False
            for rank, coming in ((p, j), (q, i)):
                if self.expert_G[coming] != EMPTY_ROW:
                    self.holds_RE[rank, self.expert_G[coming]] = True
        self.expert_G[[i, j]] = self.expert_G[[j, i]]
        self.weight_G[[i, j]] = self.weight_G[[j, i]]

    def placement(self, held_G: Ints | None = None) -> ExpertPlacement:
        """The placement; with `held_G`, that in which each slot holds what slot `held_G` holds now."""
        ids = (self.expert_G if held_G is None else self.expert_G[held_G]).tolist()
        return ExpertPlacement(
            tuple(tuple(ids[first:end]) for first, end in zip(self.first_slot[:-1], self.first_slot[1:], strict=True))
        )

    def _repack(self, busiest: int, least_gain: float, max_moves: int, node_of_rank: Ints | None) -> int:
        """Lower the load of `busiest` by dividing its experts and those of one of the lightest ranks anew. Returns the
        number of experts that moved; 0 where no division gains enough."""
        highest = float(self.load_R[busiest])
        if highest <= GOOD_ENOUGH * float(self.load_R.mean()):
            return 0
        here = self._held(busiest)
        partners = [q for q in self.load_R.argsort(kind="stable").tolist() if q != busiest]
        if node_of_rank is not None:
            partners = [q for q in partners if node_of_rank[q] == node_of_rank[busiest]]
        for partner in partners[:PARTNERS]:
            there = self._held(partner)
            if self.has_replicas and np.intersect1d(self.expert_G[here], self.expert_G[there]).size:
                continue
            slots = [*here, *there]
            even = float(self.load_R[[busiest, partner]].mean())
            room = [int(self.first_slot[rank + 1] - self.first_slot[rank]) for rank in (busiest, partner)]
            for limit in (even + 0.25 * (highest - even), highest - 2 * least_gain):
                try:
                    division = fit(self.weight_G[slots].tolist(), room, limit, spare=0, nodes=REPACK_NODES)
                except SearchTooLong:
                    continue
                if division is None:
                    continue
                # The halves are interchangeable: keep the one of which more is here already.
                stays, goes = division
                if room[0] == room[1] and sum(i < len(here) for i in goes) > sum(i < len(here) for i in stays):
                    stays, goes = goes, stays
                leaving = [slots[i] for i in goes if i < len(here)]
                coming = [slots[i] for i in stays if i >= len(here)]
                moved = len(leaving) + len(coming)
                gain = highest - max(float(self.weight_G[[slots[i] for i in half]].sum()) for half in division)
                if moved <= max_moves and gain > least_gain * max(1.0, moved / 2):
                    self._trade(busiest, leaving, partner, coming)
                    return moved
        return 0

    def _held(self, rank: int) -> list[int]:
        """The slots of `rank` that are not empty."""
        first = self.first_slot[rank]
        end = self.first_slot[rank + 1]
        return (first + np.flatnonzero(self.expert_G[first:end] != EMPTY_ROW)).tolist()

    def _trade(self, p: int, leaving: list[int], q: int, coming: list[int]) -> None:
        """Exchange the slots `leaving` of rank `p` with the slots `coming` of rank `q`."""
        both = min(len(leaving), len(coming))
        for i, j in zip(leaving, coming, strict=False):
            self.exchange(i, j)
        for extra, to in ((leaving[both:], q), (coming[both:], p)):
            first = self.first_slot[to]
            end = self.first_slot[to + 1]
            empty = first + np.flatnonzero(self.expert_G[first:end] == EMPTY_ROW)
            for i, j in zip(extra, empty.tolist(), strict=False):
                self.exchange(i, j)

    def level(
        self,
        *,
        target: float = 1.0,
        min_gain: float = 0.0,
        max_moves: int | None = None,
        others_gain: float | None = None,
        node_of_rank: Ints | None = None,
    ) -> None:
        """Repeat the exchange of two slots, one of them on the busiest rank, that lowers the busiest rank's load most.
        Where no exchange lowers it, divide its experts and those of a light rank anew.

        Ends at an imbalance of `target`, when an exchange would gain no more than `min_gain` (a fraction of the mean
        load of a rank), or before more than `max_moves` experts have moved; an exchange with an empty slot moves one,
        any other two. A new division must gain as much per moved expert as an exchange. With `others_gain`, continues
        with the busiest of the other ranks where nothing lowers the busiest one, for gains above that. With
        `node_of_rank`, exchanges are between ranks of one node only.
        """
        mean = float(self.load_R.mean())
        moves_left = len(self.expert_G) ** 2 if max_moves is None else max_moves
        # Ranks that nothing lowers. Exchanges of another rank with these do not help, because their load is higher.
        stuck_R = np.zeros(len(self.load_R), dtype=bool)
        while mean and moves_left and not stuck_R.all():
            busiest = int(np.where(stuck_R, -np.inf, self.load_R).argmax())
            if self.load_R[busiest] <= target * float(self.load_R[~stuck_R].mean()):
                return
            start = self.first_slot[busiest]
            end = self.first_slot[busiest + 1]
            shift = self.weight_G[start:end, None] - self.weight_G
            higher = np.maximum(self.load_R[busiest] - shift, self.load_R[self.rank_G] + shift)
            higher[:, start:end] = np.inf
            if moves_left == 1:
                higher[:, self.expert_G != EMPTY_ROW] = np.inf
            if node_of_rank is not None:
                higher[:, node_of_rank[self.rank_G] != node_of_rank[busiest]] = np.inf
            if self.has_replicas:
                already_there = self.holds_RE[self.rank_G[None], self.expert_G[start:end, None]]
                already_here = self.holds_RE[busiest, self.expert_G]
                higher[already_there | already_here] = np.inf
            lowest = float(higher.min())
            gain = float(self.load_R[busiest]) - lowest
            asked = min_gain if others_gain is None or not stuck_R.any() else others_gain
            least_gain = max(asked * mean, NO_GAIN * float(self.load_R[busiest]))
            if gain <= least_gain:
                moved = 0 if stuck_R.any() else self._repack(busiest, least_gain, moves_left, node_of_rank)
                moves_left -= moved
                if not moved and others_gain is None:
                    return
                stuck_R[busiest] = not moved
                continue
            i, j = np.nonzero(higher == lowest)
            i += start
            if len(i) > 1:
                # An empty slot first, as that moves one expert only; then the lowest ids.
                first = np.lexsort((self.expert_G[i], self.expert_G[j]))[0]
                i, j = i[first:], j[first:]
            moves_left -= 1 if self.expert_G[j[0]] == EMPTY_ROW else 2
            self.exchange(int(i[0]), int(j[0]))


def even_counts(items: int, room: Sequence[int]) -> list[int]:
    """Divides `items` so that counts differ only where there is no more room; the first get one more.

    Raises ValueError where there is too little room.
    """
    if items > sum(room):
        raise ValueError(f"{items} do not fit into {sum(room)} places")
    counts = [0] * len(room)
    while items:
        has_room = [place for place, limit in enumerate(room) if counts[place] < limit]
        share, more = divmod(items, len(has_room))
        for place in has_room if share else has_room[:more]:
            given = min(share or 1, room[place] - counts[place])
            counts[place] += given
            items -= given
    return counts


def pack(weights: Sequence[float], room: Sequence[int], replicas: Sequence[int] | None = None) -> list[list[int]]:
    """Returns the items of each bin: heaviest first, each to the bin with the least weight that still has room (longest
    processing time first, with a limit of items per bin).

    An item with `replicas` goes to as many bins, each with its part of the weight. Where too few bins have room, it
    gets fewer replicas.
    """
    replicas = replicas or [1] * len(weights)
    parts = [weight / n for weight, n in zip(weights, replicas, strict=True)]
    bins: list[list[int]] = [[] for _ in room]
    open_bins = [(0.0, place) for place, limit in enumerate(room) if limit]
    for item in sorted(range(len(parts)), key=lambda item: (-parts[item], item)):
        taken = [heapq.heappop(open_bins) for _ in range(min(replicas[item], len(open_bins)))]
        part = weights[item] / len(taken)
        for weight, place in taken:
            bins[place].append(item)
            if len(bins[place]) < room[place]:
                heapq.heappush(open_bins, (weight + part, place))
    return bins


def settle(experts_R: Sequence[Sequence[int]], current: ExpertPlacement) -> ExpertPlacement:
    """Gives the experts of each rank slots: those that were there keep theirs, others take free ones by id."""
    rows = []
    for experts, before in zip(experts_R, current.slots, strict=True):
        if not experts:
            rows.append((EMPTY_ROW,) * len(before))
            continue
        here = set(experts)
        newcomers = iter(sorted(here.difference(before)))
        rows.append(tuple(e if e in here else next(newcomers, EMPTY_ROW) for e in before))
    return ExpertPlacement(tuple(rows))


def as_even(current: ExpertPlacement, plan: PackingState, load_E: Floats) -> bool:
    """Returns whether `plan` is no more even than `current`, so that nothing needs to move."""
    return PackingState(current, load_E).imbalance <= plan.imbalance * (1 + NO_GAIN)
