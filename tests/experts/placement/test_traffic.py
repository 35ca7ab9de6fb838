"""Rows and bytes between ranks, compared with loops over tokens."""

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
    assert (rows_per_slot(load, placement) == rows).all()


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
    assert (visits_of_choices(ids_PTK, placement) == visits).all()


def test_traffic_bytes_and_cross_node_rows_by_hand():
    # Rank 0 sends 1, 2, 3, 4 rows to experts 0 to 3; rank 1 sends 10 to expert 0; rank 2 nothing.
    load = np.array([[1, 2, 3, 4], [10, 0, 0, 0], [0, 0, 0, 0]])
    sent = Traffic(rows_between_ranks(load, TWO_REPLICAS))
    assert sent.rows_PP.tolist() == [[4, 2, 4], [10, 0, 0], [0, 0, 0]]
    # Rank 0 sends 6 and receives 10, rank 1 sends 10 and receives 2, rank 2 receives 4; results go back.
    assert sent.bytes_trained(40, 60).tolist() == [1600, 1200, 400]
    assert sent.cross_node_fraction([0, 0, 1]) == 4 / 20
    assert sent.cross_node_fraction([0, 1, 1]) == 16 / 20
    nothing = Traffic(rows_between_ranks(np.zeros_like(load), TWO_REPLICAS))
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
    found = hierarchical_rows(rows_PP, visits_PG)
    assert (found[0] == between).all()
    assert (found[1] == inside).all()


@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(2, 8, 2), (8, 256, 8), (4, 16, 3), (4, 4, 4)])
def test_expected_visits_of_uniform_choices_equal_the_hypergeometric_mean(ranks: int, experts: int, top_k: int):
    # Probability that all choices are experts of other ranks.
    none = comb(experts - experts // ranks, top_k) / comb(experts, top_k)
    visits = expected_visits(np.full((ranks, ranks), 1000 * top_k), top_k=top_k, slots=experts)
    assert visits == pytest.approx(1000 * ranks * (1 - none))


def test_migration_cost_counts_weights_of_replicas_and_optimizer_rows_of_owners():
    new = ExpertPlacement(((0, EMPTY_ROW), (1, 2), (3, 0)))
    # Weights of expert 0 go to its new replica on rank 2, optimizer rows of expert 2 to its new owner, rank 1.
    cost = migration_cost(TWO_REPLICAS, new, weight_bytes=10, optimizer_bytes=40)
    assert (cost.experts, cost.weight_bytes, cost.optimizer_bytes, cost.bytes) == (1, 10, 40, 50)
    assert cost.busiest_rank_bytes == 50
    assert migration_cost(TWO_REPLICAS, TWO_REPLICAS, weight_bytes=10).bytes == 0
