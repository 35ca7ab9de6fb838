"""Who sends how much to whom, counted."""

from collections import Counter
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.placement.placements import placements
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement
from toolkit.experts.placement.traffic import (
    Traffic,
    expected_visits,
    hierarchical_rows,
    migration_cost,
    rows_between_ranks,
    rows_per_slot,
    visits_of_choices,
)

TWO_REPLICAS = ExpertPlacement(((0, 2), (1, 2), (3, EMPTY_ROW)))


def test_copies_split_tokens_token_by_token_and_a_rank_with_a_copy_keeps_its_own():
    load = np.zeros((3, 4), dtype=np.int64)
    load[:, 2] = [5, 4, 7]
    # Expert 2 is in global slots 1 and 3. Rank 2 has no replica: its 7 tokens go to replicas (2 + i) mod 2, 4 and 3.
    assert rows_per_slot(load, TWO_REPLICAS)[:, [1, 3]].tolist() == [[5, 0], [0, 4], [4, 3]]


@given(placements(), st.integers(0, 1000))
def test_every_token_goes_to_a_copy_of_its_expert_as_counting_one_by_one_says(placement: ExpertPlacement, seed: int):
    load = np.random.default_rng(seed).integers(0, 6, (placement.ranks, placement.num_experts))
    rows = np.zeros((placement.ranks, placement.ranks * placement.stride), dtype=np.int64)
    for source, expert in np.ndindex(load.shape):
        places = placement.replicas(expert)
        here = placement.replica_on(expert, source)
        for i in range(load[source, expert]):
            rank, slot = here or places[(source + i) % len(places)]
            rows[source, rank * placement.stride + slot] += 1
    assert (rows_per_slot(load, placement) == rows).all()


@given(placements(), st.integers(1, 4), st.integers(0, 1000))
def test_a_token_visits_the_ranks_of_its_experts_as_following_it_says(
    placement: ExpertPlacement, top_k: int, seed: int
):
    shape = (placement.ranks, 7, top_k)
    ids_STK = np.random.default_rng(seed).integers(-1, placement.num_experts, shape, dtype=np.int32)
    visits = np.zeros((placement.ranks, placement.ranks), dtype=np.int64)
    for source, ids_TK in enumerate(ids_STK.tolist()):
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
    assert (visits_of_choices(ids_STK, placement) == visits).all()


def test_bytes_of_dispatch_and_combine_and_what_crosses_nodes_by_hand():
    # Rank 0 sends 1, 2, 3, 4 rows to experts 0 to 3; rank 1 sends 10 to expert 0; rank 2 nothing.
    load = np.array([[1, 2, 3, 4], [10, 0, 0, 0], [0, 0, 0, 0]])
    sent = Traffic(rows_between_ranks(load, TWO_REPLICAS))
    assert sent.rows_SR.tolist() == [[4, 2, 4], [10, 0, 0], [0, 0, 0]]
    # Rank 0 sends 6 and gets 10, rank 1 sends 10 and gets 2, rank 2 gets 4; what is got is sent back.
    assert sent.bytes_trained(40, 60).tolist() == [1600, 1200, 400]
    assert sent.cross_node_fraction([0, 0, 1]) == 4 / 20
    assert sent.cross_node_fraction([0, 1, 1]) == 16 / 20
    nothing = Traffic(rows_between_ranks(np.zeros_like(load), TWO_REPLICAS))
    assert nothing.cross_node_fraction([0, 0, 1]) == 0.0


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1000))
def test_by_nodes_a_row_goes_to_a_node_once_and_on_from_there(nodes: int, size: int, top_k: int, seed: int):
    rng = np.random.default_rng(seed)
    ranks = nodes * size
    peers_STK = rng.integers(0, ranks, (ranks, 5, top_k))
    rows_SR, visits_SM = np.zeros((ranks, ranks), dtype=np.int64), np.zeros((ranks, nodes), dtype=np.int64)
    between, inside = np.zeros_like(rows_SR), np.zeros_like(rows_SR)
    for source, token in np.ndindex(peers_STK.shape[:2]):
        peers = peers_STK[source, token].tolist()
        for node in {peer // size for peer in peers}:
            visits_SM[source, node] += 1
            between[source, node * size + source % size] += 1
        for peer in peers:
            rows_SR[source, peer] += 1
            inside[peer // size * size + source % size, peer] += 1
    found = hierarchical_rows(rows_SR, visits_SM)
    assert (found[0] == between).all()
    assert (found[1] == inside).all()
    # Steps and layers side by side, and the same rows for the experts.
    assert (hierarchical_rows(np.stack([rows_SR] * 2), np.stack([visits_SM] * 2))[1] == inside).all()
    assert (inside.sum(0) == rows_SR.sum(0)).all()
    estimate_SM = expected_visits(rows_SR, nodes, top_k=top_k, slots=ranks)
    assert (estimate_SM <= rows_SR.reshape(ranks, nodes, size).sum(-1) + 1e-9).all()
    assert (estimate_SM >= rows_SR.reshape(ranks, nodes, size).sum(-1) / top_k - 1e-9).all()


@pytest.mark.parametrize(("nodes", "experts", "top_k"), [(2, 8, 2), (8, 256, 8), (4, 16, 3), (4, 4, 4)])
def test_expected_visits_are_those_of_tokens_that_choose_any_experts(nodes: int, experts: int, top_k: int):
    # No choice among those of a node: all out of the other experts.
    none = comb(experts - experts // nodes, top_k) / comb(experts, top_k)
    rows_SR = np.full((nodes, nodes), 1000 * top_k)
    visits = expected_visits(rows_SR, nodes, top_k=top_k, slots=experts)
    assert visits == pytest.approx(1000 * nodes * (1 - none))


def test_expected_visits_of_a_router_that_chooses_nodes_first():
    # Two of four nodes with four experts each, then three of their eight experts.
    rows_SR = np.full((4, 4), 300)
    none = comb(4, 3) / comb(8, 3)
    visits = expected_visits(rows_SR, 4, top_k=3, slots=16, nodes_per_token=2)
    assert visits == pytest.approx(400 / 2 * (1 - none))
    assert expected_visits(rows_SR, 4, top_k=3, slots=16, nodes_per_token=1) == pytest.approx(100.0)


def test_the_cost_of_a_migration_counts_weights_of_copies_and_optimizer_rows_of_owners():
    new = ExpertPlacement(((0, EMPTY_ROW), (1, 2), (3, 0)))
    # Expert 0 gets a copy on rank 2: weights from rank 0. Expert 2 loses that of its owner, rank 0: rows to rank 1.
    cost = migration_cost(TWO_REPLICAS, new, weight_bytes=10, optimizer_bytes=40)
    assert (cost.experts, cost.weight_bytes, cost.optimizer_bytes, cost.bytes) == (1, 10, 40, 50)
    assert (cost.busiest_rank_bytes, cost.peers) == (50, 2)
    assert migration_cost(TWO_REPLICAS, TWO_REPLICAS, weight_bytes=10).bytes == 0
