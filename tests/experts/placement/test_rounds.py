"""Migration schedules, simulated round by round: contents of each slot and each rank's buffer."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.placement.placements import random_placement
from toolkit.experts.placement.placement import ExpertPlacement, Move, Place, moves, owner_moves
from toolkit.experts.placement.rounds import Round, Transfer, schedule


def source(transfer: Transfer) -> Place:
    return Place(transfer.move.source_rank, transfer.move.source_slot)


def goal(transfer: Transfer) -> Place:
    return Place(transfer.move.rank, transfer.move.slot)


def simulate(rounds: list[Round], old: ExpertPlacement) -> dict[Place, int]:
    """Return the contents of the slots at the end; assert that no row is overwritten before it is sent."""
    held = {Place(rank, slot): e for rank, row in enumerate(old.slots) for slot, e in enumerate(row)}
    buffers: dict[int, Place] = {}
    parked: dict[Place, int] = {}
    for number, now in enumerate(rounds):
        assert now.transfers, "a round without progress"
        for place in now.parked:
            assert place.rank not in buffers, "two rows parked on one rank"
            buffers[place.rank], parked[place] = place, held[place]
        for transfer in now.transfers:
            origin = parked if transfer.from_buffer else held
            assert origin[source(transfer)] == transfer.move.expert, "a row was overwritten before it was sent"
        read = {source(t) for t in now.transfers if not t.from_buffer}
        assert read.isdisjoint(goal(t) for t in now.transfers if not t.into_buffer), "read and written at once"
        by_buffer = [t.move.rank for t in now.transfers if t.into_buffer]
        assert len(set(by_buffer)) == len(by_buffer), "two rows received into one buffer"
        assert buffers.keys().isdisjoint(by_buffer), "a row received into a buffer in use"
        held |= {goal(t): t.move.expert for t in now.transfers}
        still_needed = {source(t) for later in rounds[number + 1 :] for t in later.transfers if t.from_buffer}
        buffers = {rank: place for rank, place in buffers.items() if place in still_needed}
        parked = {place: parked[place] for place in buffers.values()}
    return held


def check(changes: list[Move], old: ExpertPlacement) -> list[Round]:
    rounds = schedule(changes)
    due = [transfer.move for now in rounds for transfer in now.transfers]
    by_goal = sorted(due, key=lambda move: (move.rank, move.slot))
    assert by_goal == sorted(changes, key=lambda move: (move.rank, move.slot)), "each move is made once"
    held = simulate(rounds, old)
    assert all(held[Place(move.rank, move.slot)] == move.expert for move in changes)
    return rounds


@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
@settings(max_examples=1000)
def test_schedule_completes_with_one_buffer_per_rank(seed: int, ranks: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(0, 6) for _ in range(ranks - 1)] + [rng.randint(1, 6)]
    experts = rng.randint(1, sum(sizes))
    old, new = random_placement(rng, sizes, experts), random_placement(rng, sizes, experts)
    check(moves(old, new), old)
    check(owner_moves(old, new), old)


def test_schedule_of_a_swap_or_a_ring_takes_one_round() -> None:
    old = ExpertPlacement(((0, 1), (2, 3), (4, 5)))
    # Rank 1 takes part in both swaps and has one buffer.
    two_swaps = ExpertPlacement(((2, 1), (0, 5), (4, 3)))
    assert len(check(moves(old, two_swaps), old)) == 2
    assert len(check(moves(old, ExpertPlacement(((2, 1), (0, 3), (4, 5)))), old)) == 1
    old = ExpertPlacement(tuple((rank,) for rank in range(8)))
    (ring,) = check(moves(old, ExpertPlacement(tuple(((rank + 3) % 8,) for rank in range(8)))), old)
    assert not ring.parked
