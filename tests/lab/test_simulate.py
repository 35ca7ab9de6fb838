"""Predicted steps: closed forms, what more of a machine may never do, and machines that cannot be."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.placement.placements import placements
from toolkit.errors import UserError
from toolkit.experts.placement.cost_model import EXCHANGES, HIERARCHICAL_EXCHANGES, Cores
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners import replicate
from toolkit.lab.simulate import Machine, StepSeconds, read_machine, simulate

MACHINE = Machine(
    seconds_per_row=2.0,
    seconds_per_slot=3.0,
    seconds_per_layer=5.0,
    seconds_per_row_sent=7.0,
    bytes_per_second=10.0,
    exchange_seconds=11.0,
    dense_seconds=13.0,
    dense_seconds_per_token=17.0,
    top_k=2,
    optimizer_seconds_per_slot=19.0,
)
SIZES = {"row_bytes": 4, "weight_bytes": 30, "optimizer_bytes": 60}


def seconds(machine: Machine, load_TLSE: np.ndarray, layers: list[ExpertPlacement]) -> np.ndarray:
    return simulate(load_TLSE, layers, [machine.cost_model(**SIZES)] * len(layers), machine).total_T


def test_an_even_load_takes_what_the_closed_form_says():
    steps, layers, ranks, experts, rows = 3, 2, 4, 8, 6
    load = np.full((steps, layers, ranks, experts), rows)
    slots = experts // ranks
    each = rows * experts
    # A token has none of its two experts among the two of a rank with a chance of 6 * 5 / (8 * 7).
    visits = each / 2 * (1 - 30 / 56)
    leaving = visits * (ranks - 1) * SIZES["row_bytes"] / 10.0
    layer = 5 + 7 * visits * ranks + 2 * each + 3 * slots + 2 * leaving + EXCHANGES * 11
    expected = 13 + 17 * each / 2 + layers * layer + 19 * layers * slots
    assert seconds(MACHINE, load, [contiguous(experts, ranks)] * layers).tolist() == pytest.approx([expected] * steps)
    # Twice as many ranks as cores: all but latency takes twice as long.
    on_half = replace(MACHINE, cores=Cores(count=2))
    latency = layers * EXCHANGES * 11
    assert seconds(on_half, load, [contiguous(experts, ranks)] * layers)[0] == pytest.approx(
        2 * (expected - latency) + latency
    )


def test_ranks_that_are_done_leave_the_cores_to_the_others():
    cores = Cores(count=2, busy_slowdown=1.5)
    assert cores.seconds(np.array([4.0])) == 4
    assert cores.seconds(np.array([4.0, 4.0])) == 6
    # One second each on two cores, 1.5; then the other three alone.
    assert cores.seconds(np.array([1.0, 4.0])) == 4.5
    # Four until 1 is done, on two cores: 3 s; three until 2: 2.25 s; the last two together.
    assert cores.seconds(np.array([[1.0, 2.0, 4.0, 4.0]])).tolist() == [3 + 2.25 + 3]


def test_a_layer_waits_for_its_busiest_rank_and_a_step_for_the_slowest_ep_group():
    blocks = [contiguous(2, 2)] * 2
    even, uneven = [[5, 5], [5, 5]], [[10, 0], [10, 0]]
    machine = replace(MACHINE, exchange_seconds=0.0, top_k=1)
    one, other, both = (
        seconds(machine, np.array([[first, second]]), blocks)[0]
        for first, second in ((even, even), (even, uneven), (uneven, uneven))
    )
    assert one < other < both
    assert both - other == pytest.approx(other - one)
    two_groups = np.concatenate([[[even, uneven]], [[uneven, uneven]]], axis=2)
    assert seconds(machine, two_groups, blocks)[0] == pytest.approx(both)
    with pytest.raises(ValueError, match="3 sources are no multiple of the 2 ranks"):
        seconds(machine, two_groups[:, :, :3], blocks)


@given(placements(), st.integers(0, 1000), st.sampled_from([None, 1, 2, 3]))
def test_more_of_a_machine_never_takes_longer_and_no_row_is_lost(placement: ExpertPlacement, seed: int, node: int):
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 9, (2, 1, placement.ranks, placement.num_experts))
    machine = replace(MACHINE, ranks_per_node=node, node_bytes_per_second=20.0, cores=Cores(count=2))
    before = seconds(machine, load, [placement])
    better: list[dict[str, Any]] = [
        {"bytes_per_second": 11.0},
        {"node_bytes_per_second": 30.0},
        {"cores": Cores(count=3)},
        {"seconds_per_row": 1.9},
        {"exchange_seconds": 0.0},
    ]
    for change in better:
        assert (seconds(replace(machine, **change), load, [placement]) <= before * (1 + 1e-12)).all()
    assert (seconds(machine, load + 1, [placement]) > before).all()
    # Where all that counts is the rows of all ranks, which one core computes, they are those of the trace.
    rows_alone = Machine(seconds_per_row=1.0, bytes_per_second=1e300, cores=Cores(count=1))
    assert seconds(rows_alone, load, [placement]).tolist() == pytest.approx(load.sum((1, 2, 3)).tolist())


def test_replicas_cost_their_gradients_and_weights_and_save_rows():
    load = np.zeros((1, 1, 2, 4), dtype=np.int64)
    load[..., 0] = 50
    blocks = contiguous(4, 2)
    replicas = replicate([100, 0, 0, 0], with_spare_slots(blocks, 1))
    machine = Machine(seconds_per_row=1.0, bytes_per_second=10.0)
    # Each rank computes its own 50 rows in place of rank 0 all 100, and 30 bytes travel twice.
    assert seconds(machine, load, [replicas])[0] == 50 + 2 * 30 / 10
    assert seconds(machine, load, [blocks])[0] == 100 + 2 * 50 * 4 / 10


def test_the_hierarchical_exchange_takes_what_the_closed_form_says_and_pays_where_nodes_are_far_and_few():
    ranks, experts, rows = 4, 8, 84
    load = np.full((1, 1, ranks, experts), rows)
    blocks = contiguous(experts, ranks)
    machine = Machine(
        seconds_per_row=0.0,
        seconds_per_row_sent=7.0,
        bytes_per_second=10.0,
        node_bytes_per_second=20.0,
        exchange_seconds=11.0,
        ranks_per_node=2,
        top_k=2,
    )

    def exchanges(machine: Machine) -> tuple[StepSeconds, StepSeconds]:
        flat = machine.cost_model(**SIZES)
        both = (flat, replace(flat, exchange="hierarchical"))
        return tuple(simulate(load, [blocks], [cost], machine) for cost in both)  # type: ignore[return-value]

    flat, hierarchical = exchanges(machine)
    # A token has none of its two experts among the two of a rank with a chance of 6 * 5 / (8 * 7), among the four of
    # a node with one of 4 * 3 / (8 * 7).
    tokens = rows * experts / 2
    of_rank, of_node = tokens * (1 - 30 / 56), tokens * (1 - 12 / 56)
    # Rows go to two ranks of the other node, and to the other one of the own node at the same time.
    assert flat.exchanges_T == pytest.approx([2 * 4 * 2 * of_rank / 10 + EXCHANGES * 11])
    # Rows that came from both nodes go to the other rank of the node.
    expected = 2 * 4 * (of_node / 10 + 2 * of_rank / 20) + HIERARCHICAL_EXCHANGES * 11
    assert hierarchical.exchanges_T == pytest.approx([expected])
    # Rows are put in order for the nodes, and again inside a node.
    assert flat.router_T == pytest.approx([7 * 4 * of_rank])
    assert hierarchical.router_T == pytest.approx([7 * (2 * of_node + 4 * of_rank)])

    flat, hierarchical = exchanges(replace(machine, node_bytes_per_second=200.0, exchange_seconds=0.0))
    assert hierarchical.exchanges_T < flat.exchanges_T
    flat, hierarchical = exchanges(replace(machine, ranks_per_node=1, exchange_seconds=0.0))
    assert hierarchical.exchanges_T == flat.exchanges_T, "nodes of one rank"
    with pytest.raises(ValueError, match="4 ranks with 3 per node are not on several equal nodes"):
        exchanges(replace(machine, ranks_per_node=3))


def test_a_machine_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "machine.json"
    for machine in (MACHINE, replace(MACHINE, cores=Cores(count=2, busy_slowdown=1.2), ranks_per_node=8)):
        facts = {name: value for name, value in asdict(machine).items() if value is not None}
        path.write_text(json.dumps(facts))
        assert read_machine(path) == machine


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"seconds_per_row": 1}', "bytes_per_second: Field required"),
        ('{"seconds_per_row": 1, "bytes_per_second": 0}', "bytes_per_second: Input should be greater than 0"),
    ],
)
def test_a_machine_that_cannot_be_is_one_sentence(text: str, sentence: str, tmp_path: Path):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_machine(path)
    assert sentence in str(caught.value)
