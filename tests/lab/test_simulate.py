"""Predicted step times: closed forms and monotonicity. Imbalance of synthetic loads."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.placement.placements import placements
from toolkit.experts.placement.cost_model import EXCHANGES, Cores
from toolkit.experts.placement.loads import expert_imbalance, rank_imbalance
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners import replicate
from toolkit.lab.simulate import Machine, simulate
from toolkit.lab.workloads import WORKLOADS, Sizes, burst, rotating_hotspot

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


def seconds(machine: Machine, loads: np.ndarray, layers: list[ExpertPlacement]) -> np.ndarray:
    return simulate(loads, layers, [machine.cost_model(**SIZES)] * len(layers), machine).total


def test_simulated_even_load_equals_the_closed_form():
    steps, layers, ranks, experts, rows = 3, 2, 4, 8, 6
    load = np.full((steps, layers, ranks, experts), rows)
    slots = experts // ranks
    each = rows * experts
    # Neither of a token's two experts is on a given rank with probability 6 * 5 / (8 * 7).
    tokens = each / 2 * (1 - 30 / 56)
    sent = tokens * (ranks - 1) * SIZES["row_bytes"] / 10.0
    layer = 5 + 7 * tokens * ranks + 2 * each + 3 * slots + 2 * sent + EXCHANGES * 11
    expected = 13 + 17 * each / 2 + layers * layer + 19 * layers * slots
    assert seconds(MACHINE, load, [contiguous(experts, ranks)] * layers).tolist() == pytest.approx([expected] * steps)
    # With half as many cores as ranks, everything except latency takes twice as long.
    on_half = MACHINE.replace(cores=Cores(count=2))
    latency = layers * EXCHANGES * 11
    assert seconds(on_half, load, [contiguous(experts, ranks)] * layers)[0] == pytest.approx(
        2 * (expected - latency) + latency
    )


def test_finished_ranks_release_their_cores():
    cores = Cores(count=2, busy_slowdown=1.5)
    assert cores.seconds(np.array([4.0])) == 4
    assert cores.seconds(np.array([4.0, 4.0])) == 6
    # Two ranks compute for 1 s at a slowdown of 1.5, then one rank for 3 s.
    assert cores.seconds(np.array([1.0, 4.0])) == 4.5
    # Two cores serve four ranks for 3 s, three ranks for 2.25 s and two ranks for 3 s.
    assert cores.seconds(np.array([[1.0, 2.0, 4.0, 4.0]])).tolist() == [3 + 2.25 + 3]


def test_simulated_layer_takes_as_long_as_its_busiest_rank():
    blocks, machine = [contiguous(2, 2)] * 2, MACHINE.replace(top_k=1)
    even, first, second = [[5, 5], [5, 5]], [[10, 0], [10, 0]], [[0, 10], [0, 10]]
    both_even, one, two = (seconds(machine, np.array([[even, layer]]), blocks)[0] for layer in (even, first, second))
    assert both_even < one == two
    opposed = seconds(machine, np.array([[first, second]]), blocks)[0]
    assert opposed - one == pytest.approx(one - both_even)


@given(placements(), st.integers(0, 1000))
def test_simulation_on_a_faster_machine_is_not_slower(placement: ExpertPlacement, seed: int):
    load = np.random.default_rng(seed).integers(0, 9, (2, 1, placement.ranks, placement.num_experts))
    machine = MACHINE.replace(cores=Cores(count=2))
    before = seconds(machine, load, [placement])
    for change in (
        {"bytes_per_second": 11.0},
        {"cores": Cores(count=3)},
        {"seconds_per_row": 1.9},
        {"exchange_seconds": 0.0},
    ):
        assert (seconds(machine.replace(**change), load, [placement]) <= before * (1 + 1e-12)).all()
    assert (seconds(machine, load + 1, [placement]) > before).all()
    # A single core computes the rows of all ranks.
    rows_only = Machine(seconds_per_row=1.0, bytes_per_second=1e300, cores=Cores(count=1))
    assert seconds(rows_only, load, [placement]).tolist() == pytest.approx(load.sum((1, 2, 3)).tolist())


def test_simulated_replicas_save_rows_and_send_gradients():
    load = np.zeros((1, 1, 2, 4), dtype=np.int64)
    load[..., 0] = 50
    blocks = contiguous(4, 2)
    replicas = replicate([100, 0, 0, 0], with_spare_slots(blocks, 1))
    machine = Machine(seconds_per_row=1.0, bytes_per_second=10.0)
    # Each rank computes 50 rows instead of rank 0 all 100, and 30 bytes are sent twice.
    assert seconds(machine, load, [replicas])[0] == 50 + 2 * 30 / 10
    assert seconds(machine, load, [blocks])[0] == 100 + 2 * 50 * 4 / 10


LOADS = Sizes(steps=40, ranks=4, experts=16, pairs=1000)
CONTIGUOUS = contiguous(16, 4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_depends_only_on_its_sizes(name: str):
    load = WORKLOADS[name](LOADS)
    assert load.shape == (40, 4, 16)
    assert load.dtype == np.int64
    assert load.min() >= 0
    assert (load == WORKLOADS[name](LOADS)).all()
    assert (load != WORKLOADS[name](replace(LOADS, seed=1))).any()
    assert WORKLOADS[name](Sizes(steps=2, ranks=3, experts=1)).shape == (2, 3, 1)
    if name not in ("W4", "W5"):
        assert (load.sum(-1) == 1000).all()


def imbalance(name: str) -> float:
    return rank_imbalance(WORKLOADS[name](LOADS).sum((0, 1)), CONTIGUOUS)


def test_hot_experts_on_one_rank_are_imbalanced():
    assert imbalance("W0") < 1.03
    # The 4 hot of 16 experts, on one rank of 4, receive 24 of 36 pairs.
    assert imbalance("W2") == pytest.approx(24 / 36 * 4, rel=0.02)
    assert imbalance("W3") < 1.03
    heat = [expert_imbalance(WORKLOADS[name](LOADS).sum((0, 1))).max_violation for name in ("W1", "W2", "W3")]
    assert heat == pytest.approx([1.67] * 3, rel=0.05)


def test_ragged_sources_have_balanced_experts():
    load = WORKLOADS["W4"](LOADS)
    sent = load.sum((0, 2))
    assert sent[0] / sent[-1] == pytest.approx(4, rel=0.01)
    assert expert_imbalance(load.sum((0, 1))).max_violation < 0.05


def test_zero_tokens_workload_has_idle_experts_and_an_idle_rank():
    load = WORKLOADS["W5"](LOADS)
    assert load[:, -1].sum() == 0
    assert load[:, :, :4].sum() == 0
    assert load[:, :, 5::5].sum() == 0
    assert load[:, :, 4].min(initial=1, where=np.array([True, True, True, False])) > 0


def test_hotspot_rotates_and_burst_ends():
    hottest = rotating_hotspot(LOADS, period=10).sum(1).argmax(-1) // 4
    assert hottest.tolist() == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 10
    first_block = burst(LOADS, length=5).sum(1)[:, :4].sum(-1) / 4000
    hot = np.arange(40)[first_block > 0.5]
    assert hot.tolist() == [20, 21, 22, 23, 24]
