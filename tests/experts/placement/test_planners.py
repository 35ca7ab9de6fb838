"""Planners: what each promises, on any load and any slots."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.placement.placements import placements, placements_with_loads
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.placement.loads import checked_load, rank_imbalance
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, moves, with_spare_slots
from toolkit.experts.placement.placement import contiguous as blocks
from toolkit.experts.placement.placement_options import PLANNER_NAMES
from toolkit.experts.placement.planners import (
    PLANNERS,
    contiguous,
    few_swaps,
    lpt,
    register_planner,
    replicate,
    round_robin,
    swap,
)
from toolkit.experts.placement.planners.bounds import lower_bound
from toolkit.experts.placement.planners.exact import SearchTooLong, fit
from toolkit.experts.placement.planners.fewest import unevenness
from toolkit.experts.placement.planners.packing import PackingState, even_counts, pack
from toolkit.experts.placement.planners.replicas import replicas_for
from toolkit.lab.replay import replay
from toolkit.lab.workloads import WORKLOADS, Sizes, drifting
from toolkit.run.process_settings import flushes_subnormals

Case = tuple[ExpertPlacement, list[float]]
ROUNDING = 1 + 1e-6
LEAST = sys.float_info.min


NAMES = ["contiguous", "round_robin", "lpt", "swap", "few_swaps", "replicate"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(case=placements_with_loads())
def test_every_planner_places_every_expert_in_the_slots_there_are_and_always_alike(name: str, case: Case):
    current, load = case
    plan = PLANNERS[name](load, current)
    assert [len(row) for row in plan.slots] == [len(row) for row in current.slots]
    assert plan.num_experts == current.num_experts
    assert PLANNERS[name](torch.tensor(load, dtype=torch.float64), current) == plan
    # What stays on its rank keeps its slot, unless the exchanges of a planner carried it away and back.
    if name in ("contiguous", "round_robin"):
        assert all(move.travels for move in moves(current, plan))
    if name not in ("swap", "few_swaps", "replicate"):
        assert not plan.has_replicas


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("load", [[2.0, LEAST, 0.0, 0.0], [LEAST, 0.0, 0.0, 0.0], [1e308, 1e308, 1e308, 0.0]])
@pytest.mark.parametrize("name", NAMES)
def test_planners_look_at_proportions_even_at_the_ends_of_what_a_float_can_hold(
    name: str, load: list[float], flush: bool
):
    """`flush`: as training on a CPU sets it, where half of the least number is 0."""
    current = blocks(4, 2)
    same = [value / max(load) for value in load]
    before = flushes_subnormals()
    torch.set_flush_denormal(flush)
    try:
        assert PLANNERS[name](load, current) == PLANNERS[name](same, current)
    finally:
        torch.set_flush_denormal(before)


def test_blocks_and_dealing_like_cards():
    current = ExpertPlacement(((0, 1, 2, 3, 4), (EMPTY_ROW,) * 3))
    assert contiguous([1] * 5, current).slots == ((0, 1, 2, EMPTY_ROW, EMPTY_ROW), (3, 4, EMPTY_ROW))
    assert round_robin([1] * 5, current).slots == ((0, EMPTY_ROW, 2, EMPTY_ROW, 4), (1, 3, EMPTY_ROW))


def test_longest_processing_time_by_hand():
    # 8 to bin 0, 7 to bin 1, 6 to bin 1 (lighter, now full), the rest to bin 0.
    assert pack([8, 7, 6, 1], [2, 2]) == [[0, 3], [1, 2]]
    # Bin 1 has room for one.
    assert pack([5, 4, 3], [3, 1]) == [[0, 2], [1]]
    assert even_counts(7, [1, 9, 9]) == [1, 3, 3]
    with pytest.raises(ValueError, match="4 do not fit into 3 places"):
        even_counts(4, [2, 1])


@settings(max_examples=100)
@given(
    case=placements_with_loads(),
    budget=st.one_of(st.none(), st.integers(0, 6)),
    tolerance=st.sampled_from([0.0, 0.01, 0.4]),
)
def test_swaps_never_make_it_worse_and_keep_to_their_budget(case: Case, budget: int | None, tolerance: float):
    current, load = case
    plan = swap(load, current, max_moves=budget, tolerance=tolerance)
    before, after = rank_imbalance(load, current), rank_imbalance(load, plan)
    travelled = sum(move.travels for move in moves(current, plan))
    assert after <= before * ROUNDING
    assert budget is None or travelled <= budget
    assert plan.num_replicas().tolist() == current.num_replicas().tolist()


@settings(max_examples=100)
@given(case=placements_with_loads(replicas=False), tolerance=st.sampled_from([0.0, 0.01, 0.1]))
def test_swaps_of_few_experts_are_within_their_tolerance_of_planning_from_scratch(case: Case, tolerance: float):
    current, load = case
    plan, scratch = swap(load, current, tolerance=tolerance), lpt(load, current)
    assert rank_imbalance(load, plan) <= (rank_imbalance(load, scratch) + tolerance) * ROUNDING
    # Where it is as even already, nothing moves.
    assert swap(load, scratch, tolerance=0.1) == scratch


@settings(max_examples=100)
@given(case=placements_with_loads(replicas=False), gain=st.sampled_from([0.0, 0.01, 0.1]))
def test_few_swaps_are_worth_what_they_move(case: Case, gain: float):
    current, load = case
    plan = few_swaps(load, current, gain=gain)
    travelled = sum(move.travels for move in moves(current, plan))
    if plan != current:
        before, after = (unevenness(PackingState(each, checked_load(load, each)).load_R) for each in (current, plan))
        assert before - after >= gain * travelled / 2 - 1e-6
    assert rank_imbalance(load, plan) <= rank_imbalance(load, current) * ROUNDING


def test_few_swaps_by_hand():
    # Loads 13 and 3, of a mean of 8: one exchange gives 7 and 9, and none gives 8 and 8.
    assert few_swaps([8, 5, 1, 2], blocks(4, 2)).slots == ((3, 1), (2, 0))
    assert few_swaps([8, 5, 1, 2], blocks(4, 2), gain=1.0) == blocks(4, 2)
    # 51 and 49 of 50: nothing worth a hundredth, where `swap` with no tolerance makes them equal.
    near, load = blocks(4, 2), [26, 25, 25, 24]
    assert few_swaps(load, near) == near != swap(load, near, tolerance=0.0)
    # Many experts are exchanged one after the other: the two hot ones part.
    many = [20, 20, *[1] * 38]
    plan = few_swaps(many, blocks(40, 2))
    assert sum(move.travels for move in moves(blocks(40, 2), plan)) == 2
    assert rank_imbalance(many, plan) == 1.0


def test_swaps_by_hand():
    # Loads 13 and 3: experts 0 and 3 exchanged give 7 and 9, experts 1 and 2 give 9 and 7: a tie, so the lowest id.
    assert swap([8, 5, 1, 2], blocks(4, 2)).slots == ((3, 1), (2, 0))
    assert swap([8, 5, 1, 2], ExpertPlacement(((1, 0), (2, 3)))).slots == ((1, 3), (2, 0))
    # Loads 10, 9 and 1: exchanging 5 with 1 gives 6, 9, 5, and the next 8 at best, which is 1.2 times the mean.
    thrice = [5, 5, 6, 3, 1, 0]
    assert rank_imbalance(thrice, swap(thrice, blocks(6, 3))) == pytest.approx(1.2)
    # An empty slot takes an expert alone, for one move instead of two.
    spare = ExpertPlacement(((0, 1), (2, EMPTY_ROW)))
    assert swap([3, 3, 3], spare, max_moves=1) == spare
    assert swap([5, 1, 2], spare, max_moves=1).slots == ((0, EMPTY_ROW), (2, 1))


@settings(max_examples=60)
@given(case=placements_with_loads())
def test_replicas_fill_spare_slots_with_copies_of_hot_experts_up_to_the_bound(case: Case):
    current, load = case
    plan = replicate(load, current)
    copies = plan.num_replicas()
    needless = any(n > 1 for n, weight in zip(copies.tolist(), load, strict=True) if weight == 0)
    assert plan == current or not needless
    assert rank_imbalance(load, plan) >= lower_bound(load, current, replicas=True) / ROUNDING


@settings(max_examples=60)
@given(case=placements_with_loads())
def test_planners_for_balance_are_never_worse_than_what_is_there_and_do_nothing_twice(case: Case):
    current, load = case
    plans = [(replicate, replicate(load, current))]
    if not current.has_replicas:
        plans += [(lpt, lpt(load, current))]
    for planner, plan in plans:
        assert rank_imbalance(load, plan) <= rank_imbalance(load, current) * ROUNDING
        again = planner(load, plan)
        assert again == plan or rank_imbalance(load, again) < rank_imbalance(load, plan)


def test_where_no_exchange_helps_two_ranks_are_repacked():
    # 12 and 8: 6 for 2 gives 8 and 12, but 6 for 2 and 2 gives 10 and 10. That moves three.
    load, current = [6, 6, 2, 2, 2, 2], ExpertPlacement(((0, 1, EMPTY_ROW), (2, 3, 4, 5)))
    plan = swap(load, current)
    assert rank_imbalance(load, plan) == 1.0
    assert sum(move.travels for move in moves(current, plan)) == 3
    assert swap(load, current, max_moves=2) == current
    assert swap(load, current, tolerance=0.2) == current


def test_where_the_busiest_rank_cannot_be_helped_the_others_are_levelled():
    # Rank 0 has one expert that weighs more than the mean; 9 and 1 become 5 and 5, or 4 and 6.
    load, current = [40, 0, 5, 4, 1, 0], blocks(6, 3)

    def levelled(others_gain: float | None) -> ExpertPlacement:
        packing = PackingState(current, np.array(load, dtype=float))
        packing.level(others_gain=others_gain)
        return packing.placement()

    # They gain 4, and the mean load of a rank is 50 / 3.
    assert levelled(0.2).slots == ((0, 1), (4, 3), (2, 5))
    assert levelled(0.25) == levelled(None) == current


def test_experts_that_are_alike_are_divided_into_what_fills_the_gaps():
    # Five of five ranks' load for four ranks: one expert in four copies, and the other slots stay empty.
    current = with_spare_slots(ExpertPlacement(((0, 1), (2,), (3,), (4,))), 1)
    plan = replicate([1.0] * 5, current)
    assert sorted(plan.num_replicas().tolist()) == [1, 1, 1, 1, 4]
    assert rank_imbalance([1.0] * 5, plan) == 1.0


def test_hot_experts_get_the_spare_slots():
    # 12 in three parts is 4; then 5 and 4 (5) are the heaviest copies.
    assert replicas_for([12, 5, 1], spare=2, most=4) == [3, 1, 1]
    assert replicas_for([12, 5, 1], spare=9, most=2) == [2, 2, 2]
    assert replicas_for([0, 0], spare=3, most=2) == [1, 1]
    # One at a time while copies bear more than 4: 12 in three, 5 in two. Then what is left, 2 of 3, goes to 12.
    assert replicas_for([12, 5, 1], spare=5, most=9, at_once=3, hot=4.0) == [5, 2, 1]
    plan = replicate([30, 10, 10, 10], ExpertPlacement(((0, 1, -1), (2, 3, -1))))
    assert plan.num_replicas().tolist() == [2, 2, 1, 1]
    assert rank_imbalance([30, 10, 10, 10], plan) == 1.0


def test_the_flag_and_the_tests_above_take_the_planners_that_there_are():
    assert PLANNERS.keys() == PLANNER_NAMES == set(NAMES)


def test_register_planner_makes_a_guest_known_by_name():
    def stay(load_E: object, current: ExpertPlacement) -> ExpertPlacement:  # noqa: ARG001
        return current

    register_planner("stay")(stay)
    try:
        assert PLANNERS["stay"] is stay
        assert ReplanOptions(planner="stay").planner == "stay"
    finally:
        del PLANNERS["stay"]
        PLANNER_NAMES.remove("stay")


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ([1, 2, 3], r"shape \(3,\), but the placement has 4 experts"),
        ([1, 2, 3, -1], r"at least 0, not -1"),
        ([1, 2, 3, float("nan")], "finite"),
    ],
)
def test_planner_with_an_impossible_load_raises(load: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        swap(load, blocks(4, 2))


@settings(max_examples=150)
@given(current=placements(), data=st.data())
def test_a_board_after_exchanges_is_the_board_of_its_placement(current: ExpertPlacement, data: st.DataObject):
    load = np.array(data.draw(st.lists(st.integers(0, 9), min_size=(n := current.num_experts), max_size=n)), float)
    packing = PackingState(current, load)
    packing.level()
    fresh = PackingState(packing.placement(), load)
    assert np.allclose(packing.load_R, fresh.load_R)
    assert (packing.holds_RE == fresh.holds_RE).all()
    assert (packing.weight_G == fresh.weight_G).all()


# Goals of the project, on made-up loads. `benchmarks/placement/planners.py` prints the tables.


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("experts", "ranks"), [(64, 8), (128, 8), (256, 64)])
def test_without_replicas_planners_come_within_two_percent_of_the_bound(workload: str, experts: int, ranks: int):
    sizes = Sizes(steps=20, ranks=ranks, experts=experts, assignments=32768 // ranks)
    load, current = WORKLOADS[workload](sizes).sum((0, 1)), blocks(experts, ranks)
    bound = lower_bound(load, current)
    assert rank_imbalance(load, lpt(load, current)) <= 1.02 * bound
    assert rank_imbalance(load, swap(load, current)) <= 1.02 * bound


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("experts", "ranks"), [(64, 8), (128, 8), (256, 64)])
def test_with_a_spare_slot_per_rank_replicas_come_within_two_percent_of_balance(
    workload: str, experts: int, ranks: int
):
    sizes = Sizes(steps=20, ranks=ranks, experts=experts, assignments=32768 // ranks)
    load, current = WORKLOADS[workload](sizes).sum((0, 1)), with_spare_slots(blocks(experts, ranks), 1)
    assert rank_imbalance(load, replicate(load, current)) <= 1.02 * lower_bound(load, current, replicas=True)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("workload", [WORKLOADS["W1"], WORKLOADS["W5"], WORKLOADS["W7"], drifting])
def test_few_experts_come_within_two_percent_of_a_bound_that_is_searched_for(
    ranks: int, workload: Callable[[Sizes], np.ndarray]
):
    for seed, experts in itertools.product(range(2), (8, 16)):
        load = workload(Sizes(steps=20, ranks=ranks, experts=experts, seed=seed)).sum((0, 1))
        spare = with_spare_slots(blocks(experts, ranks), 1)
        for current, planner in ((blocks(experts, ranks), lpt), (blocks(experts, ranks), swap), (spare, replicate)):
            bound = lower_bound(load, current, replicas=planner is replicate, search=20_000)
            assert rank_imbalance(load, planner(load, current)) <= 1.02 * bound


def test_a_search_finds_a_placement_or_proves_that_there_is_none_or_gives_up():
    assert fit([3, 2, 2, 1], [2, 2], 4, spare=0, nodes=100) == [[0, 3], [1, 2]]
    assert fit([3, 2, 2, 1], [3, 2], 3.9, spare=0, nodes=100) is None
    # With one copy more, a half of 2 lies beside each 3.
    assert fit([3, 3, 2], [2, 2], 4, spare=1, nodes=100) == [[0, 2], [1, 2]]
    assert fit([3, 3, 2], [2, 2], 4, spare=0, nodes=100) is None
    assert fit([1, 1], [1], 9, spare=0, nodes=100) is None
    with pytest.raises(SearchTooLong):
        fit([3, 2, 2, 1], [2, 2], 4, spare=0, nodes=3)


@pytest.mark.parametrize("experts", [64, 128])
@pytest.mark.parametrize("sigma", [0.05, 0.1])
def test_on_drifting_load_swaps_equal_planning_from_scratch_with_a_fifth_of_the_moves(experts: int, sigma: float):
    scratch, swaps = [], []
    for seed in range(5):
        load_TE = drifting(Sizes(steps=400, experts=experts, seed=seed), sigma=sigma).sum(1)
        for planner, runs in ((lpt, scratch), (swap, swaps)):
            runs.append(replay(load_TE, blocks(experts, 8), planner, every=20))
    imbalance = [np.mean([run.imbalance_T[20:].mean() for run in runs]) for runs in (scratch, swaps)]
    # Without the first plan, which has everything to put right.
    moved = [np.mean([run.experts_moved[1:] for run in runs]) for runs in (scratch, swaps)]
    assert imbalance[1] <= imbalance[0] + 0.01
    assert moved[0] >= 5 * moved[1]
