"""Placements, moves and their schedules in rounds, and traffic between ranks, compared with loops."""

import json
import random
from collections import Counter
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.placement.placements import placements, random_placement
from toolkit.errors import UserError
from toolkit.experts.placement import traffic
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, Move, Place, contiguous, moves, owner_moves
from toolkit.experts.placement.rounds import Round, Transfer, schedule


def test_uneven_placement_with_replicas_by_hand():
    placement = ExpertPlacement(((1, EMPTY_ROW, 0), (2, 1), ()))
    assert (placement.ranks, placement.num_experts, placement.stride) == (3, 3, 3)
    assert placement.replicas(1) == (Place(0, 0), Place(1, 1))
    assert placement.owner(1) == Place(0, 0)
    assert placement.replica_on(1, 1) == Place(1, 1)
    assert placement.replica_on(0, 1) is None
    assert placement.has_replicas


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((), "at least one rank"),
        (((EMPTY_ROW,), ()), "at least one expert"),
        (((0, 1), (3,)), "expert 2 has no slot"),
        (((0, 1, 0),), "rank 0 holds expert 0 twice"),
        (((0, -2),), "expert id -2 is negative"),
    ],
)
def test_invalid_slots_raise(slots: tuple[tuple[int, ...], ...], message: str):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(slots)


def test_contiguous_with_a_remainder_leaves_spare_slots():
    assert contiguous(6, 3).slots == ((0, 1), (2, 3), (4, 5))
    assert contiguous(7, 3).slots == ((0, 1, 2), (3, 4, EMPTY_ROW), (5, 6, EMPTY_ROW))
    assert contiguous(3, 2, slots_per_rank=3).slots == ((0, 1, EMPTY_ROW), (2, EMPTY_ROW, EMPTY_ROW))


def test_contiguous_with_too_many_experts_raises():
    with pytest.raises(UserError, match="num_experts=1,000,000,000: more than 1,048,576 are not supported"):
        contiguous(10**9, 2)


@given(placements())
def test_json_round_trip_and_dispatcher_tables(placement: ExpertPlacement):
    data = json.loads(json.dumps(placement.to_dict()))
    assert ExpertPlacement.from_dict(data) == placement
    with pytest.raises(ValueError, match="slots hold"):
        ExpertPlacement.from_dict({**data, "num_experts": placement.num_experts + 1})
    expert_of_slot = placement.expert_of_slot().flatten()
    for expert, row in enumerate(placement.slots_of_experts().tolist()):
        slots = [slot for slot in row if slot != EMPTY_ROW]
        assert row == slots + [EMPTY_ROW] * (len(row) - len(slots))
        assert [Place(*divmod(slot, placement.stride)) for slot in slots] == list(placement.replicas(expert))
        assert {int(expert_of_slot[slot]) for slot in slots} == {expert}
        assert len(slots) == placement.num_replicas()[expert]


def test_moves_of_owners_new_experts_and_spare_slots_by_hand():
    old, new = ExpertPlacement(((0, 1), (2, 1))), ExpertPlacement(((0, EMPTY_ROW), (2, 1)))
    assert moves(old, new) == []
    assert owner_moves(old, new) == [Move(1, 0, 1, 1, 1)], "optimizer rows move without weights"
    assert moves(ExpertPlacement(((0, EMPTY_ROW),)), ExpertPlacement(((0, 1),))) == []
    spare = ExpertPlacement(((0, 1, EMPTY_ROW), (2, 3, EMPTY_ROW)))
    assert moves(contiguous(4, 2), spare) == []
    with pytest.raises(ValueError, match=r"shorter|longer"):
        moves(contiguous(2, 1), contiguous(2, 2))


@given(st.data())
def test_moves_turn_the_old_placement_into_the_new(data: st.DataObject):
    old = data.draw(placements())
    new = data.draw(placements(ranks=old.ranks))
    rows = {(r, s): e for r, row in enumerate(old.slots) for s, e in enumerate(row)}
    after = dict(rows)
    for move in moves(old, new):
        assert rows[move.source_rank, move.source_slot] == move.expert
        assert (move.source_rank, move.source_slot) != (move.rank, move.slot)
        assert move.travels == (move.expert not in old.slots[move.rank])
        after[move.rank, move.slot] = move.expert
    for rank, row in enumerate(new.slots):
        for slot, expert in enumerate(row):
            assert expert == EMPTY_ROW or expert >= old.num_experts or after[rank, slot] == expert
    assert moves(old, old) == owner_moves(old, old) == []


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


TWO_REPLICAS = ExpertPlacement(((0, 2), (1, 2), (3, EMPTY_ROW)))


@given(placements(), st.integers(0, 1000))
def test_rows_per_slot_equals_a_loop_over_tokens(placement: ExpertPlacement, seed: int):
    load = np.random.default_rng(seed).integers(0, 6, (placement.ranks, placement.num_experts))
    rows = np.zeros((placement.ranks, placement.ranks * placement.stride), dtype=np.int64)
    for source, expert in np.ndindex(load.shape):
        places = placement.replicas(expert)
        here = placement.replica_on(expert, source)
        for i in range(load[source, expert]):
            rank, slot = here or places[(source + i) % len(places)]
            rows[source, rank * placement.stride + slot] += 1
    assert (traffic.rows_per_slot(load, placement) == rows).all()


@given(placements(), st.integers(1, 4), st.integers(0, 1000))
def test_visits_of_choices_equals_a_loop_over_tokens(placement: ExpertPlacement, top_k: int, seed: int):
    shape = (placement.ranks, 7, top_k)
    ids_PTK = np.random.default_rng(seed).integers(-1, placement.num_experts, shape, dtype=np.int32)
    visits = np.zeros((placement.ranks, placement.ranks), dtype=np.int64)
    for source, ids_TK in enumerate(ids_PTK.tolist()):
        turns = Counter[int]()
        for ids in ids_TK:
            ranks = set()
            for expert in ids:
                if expert >= 0:
                    places = placement.replicas(expert)
                    there = places[(source + turns[expert]) % len(places)]
                    ranks.add((placement.replica_on(expert, source) or there).rank)
                    turns[expert] += 1
            visits[source, list(ranks)] += 1
    assert (traffic.visits_of_choices(ids_PTK, placement) == visits).all()


def test_traffic_bytes_and_cross_node_rows_by_hand():
    # Rank 0 sends 1, 2, 3, 4 rows to experts 0 to 3; rank 1 sends 10 to expert 0; rank 2 nothing.
    load = np.array([[1, 2, 3, 4], [10, 0, 0, 0], [0, 0, 0, 0]])
    sent = traffic.Traffic(traffic.rows_between_ranks(load, TWO_REPLICAS))
    assert sent.rows_PP.tolist() == [[4, 2, 4], [10, 0, 0], [0, 0, 0]]
    # Rank 0 sends 6 and receives 10, rank 1 sends 10 and receives 2, rank 2 receives 4; results go back.
    assert sent.bytes_trained(40, 60).tolist() == [1600, 1200, 400]
    assert sent.cross_node_fraction([0, 0, 1]) == 4 / 20
    assert sent.cross_node_fraction([0, 1, 1]) == 16 / 20
    nothing = traffic.Traffic(traffic.rows_between_ranks(np.zeros_like(load), TWO_REPLICAS))
    assert nothing.cross_node_fraction([0, 0, 1]) == 0.0


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1000))
def test_hierarchical_rows_reach_each_node_once(nodes: int, size: int, top_k: int, seed: int):
    rng = np.random.default_rng(seed)
    ranks = nodes * size
    peers_PTK = rng.integers(0, ranks, (ranks, 5, top_k))
    rows_PP, visits_PG = np.zeros((ranks, ranks), dtype=np.int64), np.zeros((ranks, nodes), dtype=np.int64)
    between, inside = np.zeros_like(rows_PP), np.zeros_like(rows_PP)
    for source, token in np.ndindex(peers_PTK.shape[:2]):
        peers = peers_PTK[source, token].tolist()
        for node in {peer // size for peer in peers}:
            visits_PG[source, node] += 1
            between[source, node * size + source % size] += 1
        for peer in peers:
            rows_PP[source, peer] += 1
            inside[peer // size * size + source % size, peer] += 1
    found = traffic.hierarchical_rows(rows_PP, visits_PG)
    assert (found[0] == between).all()
    assert (found[1] == inside).all()


@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(2, 8, 2), (8, 256, 8), (4, 16, 3), (4, 4, 4)])
def test_expected_visits_of_uniform_choices_equal_the_hypergeometric_mean(ranks: int, experts: int, top_k: int):
    # Probability that all choices are experts of other ranks.
    none = comb(experts - experts // ranks, top_k) / comb(experts, top_k)
    visits = traffic.expected_visits(np.full((ranks, ranks), 1000 * top_k), top_k=top_k, slots=experts)
    assert visits == pytest.approx(1000 * ranks * (1 - none))


def test_migration_cost_counts_weights_of_replicas_and_optimizer_rows_of_owners():
    new = ExpertPlacement(((0, EMPTY_ROW), (1, 2), (3, 0)))
    # Weights of expert 0 go to its new replica on rank 2, optimizer rows of expert 2 to its new owner, rank 1.
    cost = traffic.migration_cost(TWO_REPLICAS, new, weight_bytes=10, optimizer_bytes=40)
    assert (cost.experts, cost.weight_bytes, cost.optimizer_bytes, cost.bytes) == (1, 10, 40, 50)
    assert cost.busiest_rank_bytes == 50
    assert traffic.migration_cost(TWO_REPLICAS, TWO_REPLICAS, weight_bytes=10).bytes == 0
