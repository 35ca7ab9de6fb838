"""The guard lets plans pass that pay, and takes back plans that proved worse."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.support.drifting import drifting
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard, plan_layer
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners import lpt, replicate, swap
from toolkit.lab.replay import replay, worst_span
from toolkit.lab.workloads import WORKLOADS, Sizes

# A row costs 1 s, an expert (100 bytes) that moves costs 1 s.
COST_MODEL = CostModel(seconds_per_row=1.0, bytes_per_second=100.0, weight_bytes=60, optimizer_bytes=40)
NOW = ExpertPlacement(((0, 1), (2, 3)))
PLAN = ExpertPlacement(((0, 2), (1, 3)))
UNEVEN = np.array([4.0, 4.0, 1.0, 1.0])
"""8 and 2 now, 5 and 5 under the plan."""
REVERSED = np.array([4.0, 1.0, 4.0, 1.0])
"""5 and 5 now, 8 and 2 under the plan."""


def seen(*windows: np.ndarray, cost_model: CostModel = COST_MODEL) -> MigrationGuard:
    """Return a guard after these windows, of ten steps each, in which nothing moved."""
    guard = MigrationGuard(cost_model)
    for load in windows:
        assert guard.review(load, NOW, steps=10) is None
    return guard


def costing(seconds: float) -> MigrationGuard:
    """Return a guard with three windows of `UNEVEN`, for which the plan's migration costs `seconds`."""
    return seen(UNEVEN, UNEVEN, UNEVEN, cost_model=replace(COST_MODEL, bytes_per_second=100.0 / seconds))


def test_cost_model_counts_the_busiest_rank():
    assert COST_MODEL.step_seconds(UNEVEN, NOW) == 8.0
    assert COST_MODEL.step_seconds(UNEVEN, PLAN) == 5.0
    # Expert 0 on both: 6 and 4 rows, and its gradient goes to its owner, its weights come back: 60 bytes each.
    assert COST_MODEL.step_seconds(UNEVEN, ExpertPlacement(((0, 1), (2, 3, 0)))) == pytest.approx(6.0 + 2 * 0.6)
    # Each rank sends one expert and receives one, at once.
    assert COST_MODEL.migration_seconds(NOW, PLAN) == 1.0
    assert COST_MODEL.migration_seconds(NOW, NOW) == 0.0
    # Two rows in each direction, in dispatch and combine, forward and backward.
    assert replace(COST_MODEL, row_bytes=100).seconds_of_visits(np.array([[7, 2], [2, 7]])) == 4.0


def test_guard_before_two_windows_refuses():
    for windows in range(2):
        assert not seen(*[UNEVEN] * windows).accepts(NOW, PLAN, steps=10)
    assert not seen(UNEVEN, UNEVEN).accepts(NOW, NOW, steps=10)
    assert seen(UNEVEN, UNEVEN).accepts(NOW, PLAN, steps=10)


def test_guard_takes_plans_that_save_one_and_a_half_times_their_migration():
    # The plan saves 3 s a step.
    assert costing(1.99).accepts(NOW, PLAN, steps=1)
    assert not costing(2.01).accepts(NOW, PLAN, steps=1)
    assert costing(2.01).accepts(NOW, PLAN, steps=2)


@pytest.mark.parametrize(
    ("guard", "reason"),
    [
        (seen(UNEVEN), "a gain is judged by 2 windows of loads or more"),
        (seen(UNEVEN, REVERSED), "its gain cannot be told from how the loads change between windows"),
        (seen(*[np.array([1.004, 1.004, 1.0, 1.0])] * 2), "it saves less than 0.50% of the time of the experts"),
        (
            costing(2.01),
            "until the next plan it saves 3e+03 ms, which is less than 1.5 times the 2.01e+03 ms of the migration",
        ),
    ],
)
def test_guard_counts_refused_plans_and_says_why(guard: MigrationGuard, reason: str):
    guard.accepts(NOW, NOW, steps=1)
    assert guard.refused == 0
    for refused in (1, 2):
        assert not guard.accepts(NOW, PLAN, steps=1)
        assert guard.refused == refused
        assert guard.reason.startswith(reason)


def test_promise_is_the_mean_gain_minus_one_and_a_half_standard_errors():
    # 3, 6 and 3 s a step, then 9, 6, 9: a mean of 4 and of 8, with a standard error of 1.
    assert seen(UNEVEN, 2 * UNEVEN, UNEVEN).promise(NOW, PLAN) == pytest.approx(4.0 - 1.5)
    assert seen(3 * UNEVEN, 2 * UNEVEN, 3 * UNEVEN).promise(NOW, PLAN) == pytest.approx(8.0 - 1.5)
    # The last three windows count if their bound is larger, as for loads that drift.
    assert seen(REVERSED, *[UNEVEN] * 3).promise(NOW, PLAN) == pytest.approx(3.0)
    # All windows count if their bound is larger: 3 and 15 s in turn, then three windows of a loss.
    assert seen(*[UNEVEN, 5 * UNEVEN] * 8, *[REVERSED] * 3).promise(NOW, PLAN) > 0
    # Windows before the last twenty are forgotten.
    assert seen(*[REVERSED] * 9, *[UNEVEN] * 20).promise(NOW, PLAN) == pytest.approx(3.0)


def test_guard_rolls_back_a_plan_that_was_worse_in_two_windows_in_a_row():
    guard = seen(UNEVEN, UNEVEN)
    assert guard.accepts(NOW, PLAN, steps=10)
    assert guard.review(REVERSED, PLAN, steps=10) is None
    assert guard.review(UNEVEN, PLAN, steps=10) is None, "one good window starts over"
    assert guard.review(REVERSED, PLAN, steps=10) is None
    assert guard.review(REVERSED, PLAN, steps=0) is None, "a return must pay too"
    assert guard.review(REVERSED, PLAN, steps=1) == NOW
    assert guard.review(REVERSED, NOW, steps=10) is None, "it is ordered once"


def test_guard_rolls_back_to_the_placement_before_the_last():
    guard, third = seen(UNEVEN, UNEVEN), ExpertPlacement(((0, 3), (1, 2)))
    assert guard.accepts(NOW, PLAN, steps=100)
    for _ in range(3):  # NOW and PLAN are alike, `third` is better
        assert guard.review(np.array([4.0, 2.0, 2.0, 0.0]), PLAN, steps=100) is None
    assert guard.accepts(PLAN, third, steps=100)
    best_of_now = np.array([4.0, 0.0, 3.0, 1.0])
    assert guard.review(best_of_now, third, steps=100) is None
    assert guard.review(best_of_now, third, steps=100) == NOW


EVEN = np.array([2.0, 2.0, 2.0, 2.0])
TOGETHER = np.array([[[0, 2], [1, 3]], [[2, 0], [3, 1]]])
"""Of two ranks with two tokens each: experts 0 and 2 are chosen together, so under NOW each token visits two ranks."""


def test_guard_counts_what_a_plan_saves_of_the_exchange_of_rows():
    for row_bytes, choices, taken in ((100, TOGETHER, True), (100, None, False), (0, TOGETHER, False)):
        guard = MigrationGuard(replace(COST_MODEL, row_bytes=row_bytes))
        for _ in range(2):
            assert guard.review(EVEN, NOW, steps=10, choices_PTK=choices) is None
        assert guard.accepts(NOW, PLAN, steps=10) == taken
    guard = MigrationGuard(replace(COST_MODEL, row_bytes=100))
    for _ in range(2):
        guard.review(EVEN, NOW, steps=10, choices_PTK=TOGETHER)
    assert guard.accepts(NOW, PLAN, steps=10)
    # 5 s with experts as they were, 5.5 s and 2 s less for rows as they are.
    nearly = np.array([2.75, 2.25, 2.75, 2.25])
    for choices, kept in ((TOGETHER, True), (TOGETHER, True), (None, True), (None, False)):
        assert (guard.review(nearly, PLAN, steps=100, choices_PTK=choices) is None) == kept


def test_guard_restored_from_its_state_decides_alike():
    loads = drifting(Sizes(steps=400, ranks=4, experts=16, heat=4.0), sigma=0.03).sum(1).reshape(20, 20, 16).mean(1)
    cost_model = CostModel(seconds_per_row=1e-3, bytes_per_second=100.0, weight_bytes=60, optimizer_bytes=40)
    kept, saved = MigrationGuard(cost_model), MigrationGuard(cost_model)
    placement, decisions = contiguous(16, 4), set()
    for load in loads:
        state = json.loads(json.dumps(saved.state_dict()))
        saved = MigrationGuard(cost_model)
        saved.load_state_dict(state)
        plan = plan_layer(swap, load, placement, guard=kept, steps=20)
        assert plan_layer(swap, load, placement, guard=saved, steps=20) == plan
        decisions.add(plan is None)
        placement = plan or placement
    assert decisions == {True, False}


def test_plan_layer_without_a_guard_applies_every_change():
    crossed = ExpertPlacement(((2, 1), (0, 3)))
    assert plan_layer(swap, UNEVEN, NOW, steps=10) == crossed
    assert plan_layer(swap, UNEVEN, crossed, steps=10) is None


# --- replayed loads ----------------------------------------------------------------------------------------------

EXPERT = 3 * 2048 * 1024
"""Parameters of an expert: bf16 weights; moments and master weights in float32."""
CLUSTER = CostModel(seconds_per_row=1e-6, bytes_per_second=25e9, weight_bytes=2 * EXPERT, optimizer_bytes=12 * EXPERT)
EVERY, ROUNDING = 20, 1 + 1e-9


@pytest.mark.parametrize("workload", WORKLOADS)
def test_guarded_planner_is_never_worse_than_no_plans_over_two_plans(workload: str):
    loads, blocks = WORKLOADS[workload](Sizes(steps=400)), contiguous(64, 8)
    for planner, start in ((swap, blocks), (lpt, blocks), (replicate, with_spare_slots(blocks, 1))):
        run = replay(loads, start, planner, every=EVERY, guard=MigrationGuard(CLUSTER))
        assert worst_span(loads, run, CLUSTER) <= ROUNDING
        if workload in ("W2", "W6"):
            assert run.imbalance.mean() < replay(loads, start, None, every=EVERY).imbalance.mean() / 1.5
