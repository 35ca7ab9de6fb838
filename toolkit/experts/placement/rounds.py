"""The order in which rows move, so that none is overwritten before it was sent.

Slots are nodes, moves are edges. Each slot receives from at most one other, so a connected component is a tree, or one
cycle with trees attached to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.experts.placement.placement import Move, Place


@dataclass(frozen=True, slots=True)
class Transfer:
    """One move of a round."""

    move: Move
    from_buffer: bool
    """Whether its rows were put into the buffer of their rank in an earlier round."""
    into_buffer: bool
    """Whether its slot is itself sent in this round, so that the rows are written when the round ends."""


@dataclass(frozen=True, slots=True)
class Round:
    """Moves whose rows are sent together, after the rows of some slots were put into buffers."""

    parked: tuple[Place, ...]
    """Slots whose rows are put into their rank's buffer first."""
    transfers: tuple[Transfer, ...]


def schedule(moves: Sequence[Move]) -> list[Round]:
    """Return rounds that make every move once, such that no row is overwritten before all its receivers have it, with a
    buffer of one row per rank.

    A slot takes its new rows if no slot waits for its old rows, or if all waiting slots receive them in the same round
    and the buffer of its rank is free. The remaining moves are cycles. A cycle that visits each rank at most once takes
    one round. In any other cycle, one slot is put into its rank's buffer, which turns the cycle into a chain with a
    free end. So each round makes progress.
    """
    pending = {Place(move.rank, move.slot): move for move in sorted(moves, key=lambda move: (move.rank, move.slot))}
    waiting: dict[Place, set[Place]] = defaultdict(set)
    """Slot -> the slots that still wait for its rows."""
    for place, move in pending.items():
        waiting[_source(move)].add(place)
    parked: set[Place] = set()
    rounds = []
    while pending:
        draft = _Draft(pending, waiting, parked)
        draft.take_chains([place for place in pending if not waiting[place]])
        for cycle in draft.cycles():
            draft.take_cycle(cycle)
        rounds.append(draft.finish())
    return rounds


def _source(move: Move) -> Place:
    return Place(move.source_rank, move.source_slot)


class _Draft:
    """A round that is being planned, with `pending`, `waiting` and `parked` left by earlier rounds."""

    def __init__(self, pending: dict[Place, Move], waiting: dict[Place, set[Place]], parked: set[Place]):
        self.pending, self.waiting, self.parked = pending, waiting, parked
        self.taken: dict[Place, bool] = {}
        """Slot -> whether its new rows go through the buffer."""
        self.newly_parked: list[Place] = []
        self.busy = {place.rank for place in parked}
        """Ranks whose buffer is in use."""

    def take_chains(self, free: list[Place]) -> None:
        """Fill the `free` slots, then those that this sends, as far as buffers are free."""
        self.taken |= dict.fromkeys(free, False)
        while free:
            place = _source(self.pending[free.pop()])
            can_follow = place in self.pending and place not in self.taken and self.waiting[place] <= self.taken.keys()
            if can_follow and place.rank not in self.busy:
                self._take_by_buffer(place)
                free.append(place)

    def _take_by_buffer(self, place: Place) -> None:
        self.taken[place] = True
        self.busy.add(place.rank)

    def cycles(self) -> list[list[Place]]:
        """Return the cycles of remaining moves in which only the next slot of the cycle waits for each slot."""
        found = []
        seen = set(self.taken)
        for start in self.pending:
            path: list[Place] = []
            place = start
            while place in self.pending and place not in seen:
                seen.add(place)
                path.append(place)
                place = _source(self.pending[place])
            if place in path:
                cycle = path[path.index(place) :]
                if all(len(self.waiting[place] - self.taken.keys()) == 1 for place in cycle):
                    found.append(cycle)
        return found

    def take_cycle(self, cycle: list[Place]) -> None:
        ranks = {place.rank for place in cycle}
        if len(ranks) == len(cycle) and not ranks & self.busy:
            for place in cycle:
                self._take_by_buffer(place)
            return
        opening = min((place for place in cycle if place.rank not in self.busy), default=None)
        if opening is not None:
            self.newly_parked.append(opening)
            self.parked.add(opening)
            self.busy.add(opening.rank)
            self.take_chains([opening])

    def finish(self) -> Round:
        """Return the round; its moves are no longer pending."""
        transfers = []
        for place, into_buffer in sorted(self.taken.items()):
            move = self.pending.pop(place)
            transfers.append(Transfer(move, _source(move) in self.parked, into_buffer))
        for transfer in transfers:
            self.waiting[_source(transfer.move)].remove(Place(transfer.move.rank, transfer.move.slot))
        self.parked -= {place for place in self.parked if not self.waiting[place]}
        return Round(tuple(self.newly_parked), tuple(transfers))
