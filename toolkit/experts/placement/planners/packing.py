"""Shared code of the planners: slots as arrays, packing, and swaps that balance the load.

Letters: `E` experts, `P` ranks of an EP group. Arrays `..._of_slot` count the slots of all ranks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from toolkit.experts.placement.loads import Floats, Ints
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement

NO_GAIN = 1e-9
"""Gains below this fraction of a load are rounding."""
LITTLE_GAIN = 1e-3
"""Least gain that planners from scratch follow, as a fraction of the mean load of a rank."""


class PackingState:
    """The slots of a placement while experts are exchanged. Replicas share an expert's load equally."""

    def __init__(self, placement: ExpertPlacement, load_E: Floats):
        sizes = placement.slots_per_rank
        self.expert_of_slot: Ints = np.array(list(itertools.chain.from_iterable(placement.slots)), dtype=np.int64)
        self.rank_of_slot: Ints = np.repeat(np.arange(len(sizes)), sizes)
        self.first_slot = np.cumsum([0, *sizes])
        held = self.expert_of_slot != EMPTY_ROW
        replicas_E = np.bincount(self.expert_of_slot[held], minlength=len(load_E))
        self.has_replicas = bool((replicas_E > 1).any())
        self.home_PE = np.zeros((len(sizes), len(load_E) + 1), dtype=bool)
        """Experts of each rank before any exchange; the last column is for empty slots."""
        self.home_PE[self.rank_of_slot[held], self.expert_of_slot[held]] = True
        # EMPTY_ROW indexes the last element: an empty slot has weight 0, and no rank holds it.
        self.weight_of_slot: Floats = np.append(load_E / replicas_E, 0.0)[self.expert_of_slot]
        self.load_P: Floats = np.zeros(len(sizes))
        np.add.at(self.load_P, self.rank_of_slot, self.weight_of_slot)
        # Only for replicas: without them an exchange cannot put an expert on a rank twice.
        self.holds_PE = self.home_PE.copy() if self.has_replicas else self.home_PE[:0]

    @property
    def imbalance(self) -> float:
        """Busiest rank over mean; 1 without load."""
        mean = float(self.load_P.mean())
        return float(self.load_P.max()) / mean if mean else 1.0

    def exchange(self, i: int, j: int) -> None:
        """Swap the experts of slots `i` and `j`."""
        p = self.rank_of_slot[i]
        q = self.rank_of_slot[j]
        for rank, leaving, coming in ((p, i, j), (q, j, i)):
            self.load_P[rank] += self.weight_of_slot[coming] - self.weight_of_slot[leaving]
        if self.has_replicas:
            self.holds_PE[[p, q], self.expert_of_slot[[i, j]]] = False
            for rank, coming in ((p, j), (q, i)):
                if self.expert_of_slot[coming] != EMPTY_ROW:
                    self.holds_PE[rank, self.expert_of_slot[coming]] = True
        self.expert_of_slot[[i, j]] = self.expert_of_slot[[j, i]]
        self.weight_of_slot[[i, j]] = self.weight_of_slot[[j, i]]

    def _away(self, source: Any, expert: Ints, target: Any) -> Ints:
        """Return 1 if `expert` leaves its rank from before the first exchange, -1 if it comes back, else 0."""
        return self.home_PE[source, expert].astype(np.int64) - self.home_PE[target, expert]

    def placement(self) -> ExpertPlacement:
        """Return the placement that holds the same."""
        ids = self.expert_of_slot.tolist()
        return ExpertPlacement(
            tuple(tuple(ids[first:end]) for first, end in zip(self.first_slot[:-1], self.first_slot[1:], strict=True))
        )

    def level(self, *, min_gain: float, price: float = 0.0, others_gain: float | None = None) -> None:
        """Exchange two slots, one of them on the busiest rank, again and again: each time the exchange that lowers the
        busiest rank's load most, after the price of its moves.

        Args:
            min_gain: The least gain of an exchange, as a fraction of the mean load of a rank.
            price: The gain that each expert has to add which leaves the rank where it was before the first exchange.
            others_gain: The least gain of exchanges on the next busiest ranks, which follow once no exchange lowers the
                busiest one. None: no such exchanges.
        """
        mean = float(self.load_P.mean())
        # Ranks that nothing lowers. Exchanges of another rank with these do not help, because their load is higher.
        stuck_P = np.zeros(len(self.load_P), dtype=bool)
        while mean and not stuck_P.all():
            busiest = int(np.where(stuck_P, -np.inf, self.load_P).argmax())
            if self.load_P[busiest] <= float(self.load_P[~stuck_P].mean()):
                return
            start = self.first_slot[busiest]
            end = self.first_slot[busiest + 1]
            shift = self.weight_of_slot[start:end, None] - self.weight_of_slot
            higher = np.maximum(self.load_P[busiest] - shift, self.load_P[self.rank_of_slot] + shift)
            higher[:, start:end] = np.inf
            if self.has_replicas:
                already_there = self.holds_PE[self.rank_of_slot[None], self.expert_of_slot[start:end, None]]
                already_here = self.holds_PE[busiest, self.expert_of_slot]
                higher[already_there | already_here] = np.inf
            if price:
                leaves = self._away(busiest, self.expert_of_slot[start:end, None], self.rank_of_slot)
                comes = self._away(self.rank_of_slot, self.expert_of_slot, busiest)
                higher += price * mean * np.maximum(leaves + comes, 0)
            lowest = float(higher.min())
            asked = min_gain if others_gain is None or not stuck_P.any() else others_gain
            if float(self.load_P[busiest]) - lowest <= max(asked * mean, NO_GAIN * float(self.load_P[busiest])):
                if others_gain is None:
                    return
                stuck_P[busiest] = True
                continue
            i, j = np.nonzero(higher == lowest)
            i += start
            # Of equal exchanges an empty slot comes first, because that moves one expert only; then the lowest ids.
            first = np.lexsort((self.expert_of_slot[i], self.expert_of_slot[j]))[0]
            self.exchange(int(i[first]), int(j[first]))


def in_turns(items: int, room: Sequence[int]) -> list[int]:
    """Return the place of each item: places take one item each in turn, as long as they have room."""
    turns = range(max(room))
    return [place for turn in turns for place, limit in enumerate(room) if turn < limit][:items]


def pack(weights: Sequence[float], room: Sequence[int], replicas: Sequence[int] | None = None) -> list[list[int]]:
    """Return the items of each bin: heaviest first, each to the bin with the least weight that still has room (longest
    processing time first, with a limit of items per bin).

    An item with `replicas` is split over this number of bins, or fewer if too few have room, with equal weights.
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


def settle(experts_P: Sequence[Sequence[int]], current: ExpertPlacement) -> ExpertPlacement:
    """Give the experts of each rank slots: those that were there keep theirs, others take free ones by id."""
    rows = []
    for experts, before in zip(experts_P, current.slots, strict=True):
        if not experts:
            rows.append((EMPTY_ROW,) * len(before))
            continue
        here = set(experts)
        newcomers = iter(sorted(here.difference(before)))
        rows.append(tuple(e if e in here else next(newcomers, EMPTY_ROW) for e in before))
    return ExpertPlacement(tuple(rows))


def as_even(current: ExpertPlacement, plan: PackingState, load_E: Floats) -> bool:
    """Return whether `plan` is no more even than `current`, so that nothing needs to move."""
    return PackingState(current, load_E).imbalance <= plan.imbalance * (1 + NO_GAIN)
