"""Who sends how much to whom, counted."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.placement.placements import placements
from toolkit.parallel.ownership import EMPTY_ROW
from toolkit.placement.placement import ExpertPlacement
from toolkit.placement.traffic import Traffic, migration_cost, rows_between_ranks, rows_per_slot

TWO_REPLICAS = ExpertPlacement(((0, 2), (1, 2), (3, EMPTY_ROW)))


def test_copies_split_tokens_token_by_token_and_a_rank_with_a_copy_keeps_its_own():
    load = np.zeros((3, 4), dtype=np.int64)
    load[:, 2] = [5, 4, 7]
    # Expert 2 is in global slots 1 and 3. Rank 2 has no replica: its 7 tokens go to replicas (2 + i) mod 2, 4 and 3.
    assert rows_per_slot(load, TWO_REPLICAS)[:, [1, 3]].tolist() == [[5, 0], [0, 4], [4, 3]]
    # Rank 1 starts with copy 1.
    assert rows_per_slot(load, TWO_REPLICAS, local_first=False)[:, [1, 3]].tolist() == [[3, 2], [2, 2], [4, 3]]


@given(placements(), st.integers(0, 1000), st.booleans())
def test_every_token_goes_to_a_copy_of_its_expert_as_counting_one_by_one_says(
    placement: ExpertPlacement, seed: int, local_first: bool
):
    load = np.random.default_rng(seed).integers(0, 6, (placement.ranks, placement.num_experts))
    rows = np.zeros((placement.ranks, placement.ranks * placement.stride), dtype=np.int64)
    for source, expert in np.ndindex(load.shape):
        places = placement.replicas(expert)
        here = placement.replica_on(expert, source) if local_first else None
        for i in range(load[source, expert]):
            rank, slot = here or places[(source + i) % len(places)]
            rows[source, rank * placement.stride + slot] += 1
    assert (rows_per_slot(load, placement, local_first=local_first) == rows).all()


def test_bytes_of_dispatch_and_combine_and_what_crosses_nodes_by_hand():
    # Rank 0 sends 1, 2, 3, 4 rows to experts 0 to 3; rank 1 sends 10 to expert 0; rank 2 nothing.
    load = np.array([[1, 2, 3, 4], [10, 0, 0, 0], [0, 0, 0, 0]])
    sent = Traffic(rows_between_ranks(load, TWO_REPLICAS))
    assert sent.rows_SR.tolist() == [[4, 2, 4], [10, 0, 0], [0, 0, 0]]
    assert sent.load_R.tolist() == [14, 2, 4]
    assert sent.bytes_dispatched(100).tolist() == [600, 1000, 0]
    assert sent.bytes_combined(100).tolist() == [1000, 200, 400]
    assert sent.local_fraction == 4 / 20
    assert sent.cross_node_fraction([0, 0, 1]) == 4 / 20
    assert sent.cross_node_fraction([0, 1, 1]) == 16 / 20
    nothing = Traffic(rows_between_ranks(np.zeros_like(load), TWO_REPLICAS))
    assert (nothing.local_fraction, nothing.cross_node_fraction([0, 0, 1])) == (1.0, 0.0)


def test_the_cost_of_a_migration_counts_weights_of_copies_and_optimizer_rows_of_owners():
    new = ExpertPlacement(((0, EMPTY_ROW), (1, 2), (3, 0)))
    # Expert 0 gets a copy on rank 2: weights from rank 0. Expert 2 loses that of its owner, rank 0: rows to rank 1.
    cost = migration_cost(TWO_REPLICAS, new, weight_bytes=10, optimizer_bytes=40)
    assert (cost.experts, cost.weight_bytes, cost.optimizer_bytes, cost.bytes) == (1, 10, 40, 50)
    assert (cost.busiest_rank_bytes, cost.peers) == (50, 2)
    assert migration_cost(TWO_REPLICAS, TWO_REPLICAS, weight_bytes=10).bytes == 0
