"""Measures of imbalance, and the guard, which accepts plans that save more time than their migration costs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard, plan_layer
from toolkit.experts.placement.loads import Window, expert_imbalance, max_over_mean, rank_imbalance, window_of
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners import lpt, replicate, swap
from toolkit.lab.replay import replay
from toolkit.lab.workloads import WORKLOADS, Sizes


def test_max_over_mean_of_steps_differs_from_the_mean_load():
    load = np.array([[2, 0], [0, 2], [0, 0]])
    assert max_over_mean(load).tolist() == [2.0, 2.0, 1.0]
    assert max_over_mean(load.mean(0)) == 1.0


def test_rank_imbalance_divides_the_load_of_replicas():
    # Ranks have 9 + 6/2, 6/2 + 1 and 4: a maximum of 12 and a mean of 20/3.
    placement = ExpertPlacement(((0, 1), (2, 1), (3, -1)))
    assert rank_imbalance([9, 6, 1, 4], placement) == pytest.approx(12 / (20 / 3))
    assert rank_imbalance([0, 0, 0, 0], placement) == 1.0


def test_expert_imbalance_by_hand():
    even = expert_imbalance([5, 5, 5, 5])
    assert (even.max_violation, even.variation) == (0.0, 0.0)
    assert even.entropy == pytest.approx(1.0)
    # Two of four experts: ln 2 / ln 4.
    half = expert_imbalance([6, 6, 0, 0])
    assert (half.max_violation, half.variation) == (1.0, 1.0)
    assert half.entropy == pytest.approx(0.5)
    assert expert_imbalance([7, 0]).entropy == 0.0
    assert expert_imbalance([0, 0]).max_violation == 0.0


# One row costs 1 s, the migration of one expert (100 bytes) 1 s.
COST_MODEL = CostModel(seconds_per_row=1.0, bytes_per_second=100.0, weight_bytes=60, optimizer_bytes=40)
NOW = ExpertPlacement(((0, 1), (2, 3)))
PLAN = ExpertPlacement(((0, 2), (1, 3)))
UNEVEN = np.array([4.0, 4.0, 1.0, 1.0])
"""8 and 2 now, 5 and 5 under the plan."""
REVERSED = np.array([4.0, 1.0, 4.0, 1.0])
"""5 and 5 now, 8 and 2 under the plan."""


def window(*loads: np.ndarray) -> Window:
    """Return a window with a part of ten steps for each load."""
    return Window(np.stack(loads), np.full(len(loads), 10))


STEADY = window(*[UNEVEN] * 4)


def costing(seconds: float) -> CostModel:
    """Return a cost model by which the plan's migration takes `seconds`."""
    return replace(COST_MODEL, bytes_per_second=100.0 / seconds if seconds else math.inf)


def test_cost_model_counts_the_busiest_rank():
    assert COST_MODEL.step_seconds(UNEVEN, NOW) == 8.0
    assert COST_MODEL.step_seconds(UNEVEN, PLAN) == 5.0
    # Expert 0 on both: 6 and 4 rows, and its gradient goes to its owner, its weights come back: 60 bytes each.
    assert COST_MODEL.step_seconds(UNEVEN, ExpertPlacement(((0, 1), (2, 3, 0)))) == pytest.approx(6.0 + 2 * 0.6)
    # Each rank sends one expert and receives one at the same time.
    assert COST_MODEL.migration_seconds(NOW, PLAN) == 1.0
    assert COST_MODEL.migration_seconds(NOW, NOW) == 0.0
    # Two rows in each direction, in dispatch and combine, forward and backward.
    rows_of_100_bytes = replace(COST_MODEL, row_bytes=100)
    assert rows_of_100_bytes.seconds_of_visits(np.array([[7, 2], [2, 7]])) == 4.0
    # Rank 0 receives the rows that both others send.
    assert rows_of_100_bytes.seconds_of_visits(np.array([[0, 0, 0], [3, 0, 0], [4, 0, 0]])) == 14.0


@pytest.mark.parametrize(
    ("planned", "cost_model", "reason"),
    [
        (STEADY, COST_MODEL, ""),
        (window(*[UNEVEN] * 3), COST_MODEL, "a window of fewer than 4 steps does not show how loads change"),
        (window(UNEVEN, REVERSED, UNEVEN, REVERSED), COST_MODEL, "its gain cannot be told from how the loads change"),
        (window(*[np.array([1.012, 1.012, 1.0, 1.0])] * 4), costing(0.01), ""),
        (window(*[np.array([1.009, 1.009, 1.0, 1.0])] * 4), COST_MODEL, "it saves less than 0.50% of the time"),
        # The plan saves 3 s per step, 120 s in the next window.
        (STEADY, costing(79.9), ""),
        (STEADY, costing(80.1), "in 40 steps it saves 1.2e+05 ms, which is less than 1.5 times the 8.01e+04"),
    ],
)
def test_guard_accepts_plans_or_counts_them_and_gives_the_reason(planned: Window, cost_model: CostModel, reason: str):
    guard = MigrationGuard(cost_model)
    assert not guard.accepts(NOW, NOW, planned, lambda *_: PLAN)
    assert guard.refused == 0
    for rejected in (1, 2):
        assert guard.accepts(PLAN, NOW, planned, lambda *_: PLAN) == (not reason)
        assert guard.refused == (rejected if reason else 0)
        assert guard.reason.startswith(reason)
        assert bool(guard.reason) == bool(reason)


def migrations(loads: list[np.ndarray], seconds: float) -> list[bool]:
    """Return whether the guard accepts a plan after each window; a migration takes `seconds`."""
    guard, current, found = MigrationGuard(costing(seconds)), NOW, []
    for load in loads:
        plan = plan_layer(
            lambda load_E, _: PLAN if load_E[1] > load_E[2] else NOW, window(*[load] * 4), current, guard=guard
        )
        found.append(plan is not None)
        current = plan or current
    return found


def test_guard_under_steady_loads_gives_a_plan_more_windows_to_save_its_migration():
    # 120 s in a window: four confirmed windows are more than 1.5 times 300 s.
    assert migrations([UNEVEN] * 7, 300.0) == [False] * 4 + [True] + [False] * 2
    assert not any(migrations([UNEVEN] * 20, 8 * 80.1))
    assert not any(migrations([UNEVEN, UNEVEN, REVERSED] * 6, 300.0))


def test_guard_rejects_plans_after_false_predictions_until_others_come_true():
    alternating = [UNEVEN, REVERSED] * 6
    assert migrations(alternating, 1.0) == [True] + [False] * 11
    assert migrations([*alternating, *[REVERSED] * 4], 1.0)[-4:] == [False, False, True, False]


def test_guard_measures_the_link_for_a_plan_that_would_be_worthwhile_without_migration_costs():
    measured = iter([100 / 80.1])
    guard = MigrationGuard(costing(0.0), measure_link=lambda: next(measured))
    assert not guard.accepts(PLAN, NOW, window(*[REVERSED] * 4), lambda *_: PLAN)
    assert not guard.accepts(PLAN, NOW, STEADY, lambda *_: PLAN)
    assert guard.cost_model == costing(80.1)


def test_predicted_gain_of_the_earlier_half_is_measured_in_the_later_half():
    calls = []

    def planner(load_E: Any, current: ExpertPlacement) -> ExpertPlacement:
        calls.append((load_E.tolist(), current))
        return PLAN

    # 3, 6 and 3 s per step in the later half: a mean of 4 with a standard error of 1.
    loads = window(REVERSED, 3 * REVERSED, 2 * REVERSED, UNEVEN, 2 * UNEVEN, UNEVEN)
    assert MigrationGuard(COST_MODEL).predicted_gain(NOW, loads, planner) == pytest.approx(4.0 - 2.0)
    assert calls == [((2 * REVERSED).tolist(), NOW)]


def test_window_has_equal_parts_and_the_mean_of_its_steps():
    loads = np.random.default_rng(0).random((21, 4))
    full = window_of(loads)
    assert full.steps_S.tolist() == [3] * 5 + [2] * 3
    assert full.steps == 21
    np.testing.assert_allclose(full.load_E, loads.mean(0))
    np.testing.assert_allclose(full.load_SE[[0, 7]], [loads[:3].mean(0), loads[19:].mean(0)])
    earlier, later = full.halves()
    np.testing.assert_allclose([earlier.load_E, later.load_E], [loads[:12].mean(0), loads[12:].mean(0)])
    assert window_of(loads[:3]).steps_S.tolist() == [1] * 3


def test_guard_counts_the_exchange_time_that_a_plan_saves():
    even = window(*[np.array([2.0, 2.0, 2.0, 2.0])] * 4)
    # Each of four tokens chooses two experts that are on two ranks now, and on one rank under the plan.
    together = np.array([[[0, 2], [1, 3]], [[2, 0], [3, 1]]])
    for row_bytes, choices, accepted in ((100, together, True), (100, None, False), (0, together, False)):
        guard = MigrationGuard(replace(COST_MODEL, row_bytes=row_bytes))
        assert guard.accepts(PLAN, NOW, even, lambda *_: PLAN, choices) == accepted


def test_plan_layer_without_a_guard_applies_every_change():
    crossed = ExpertPlacement(((2, 1), (0, 3)))
    assert plan_layer(swap, STEADY, NOW) == crossed
    assert plan_layer(swap, STEADY, crossed) is None


EXPERT = 3 * 2048 * 1024
"""Parameters of an expert: bf16 weights; moments and master weights in float32."""
CLUSTER = CostModel(seconds_per_row=1e-6, bytes_per_second=25e9, weight_bytes=2 * EXPERT, optimizer_bytes=12 * EXPERT)
EVERY = 20


@pytest.mark.parametrize("workload", WORKLOADS)
def test_guarded_planner_is_not_slower_than_experts_that_stay(workload: str):
    loads, start = WORKLOADS[workload](Sizes(steps=400)), contiguous(64, 8)
    for planner, placement in ((swap, start), (lpt, start), (replicate, with_spare_slots(start, 1))):
        run = replay(loads, placement, planner, every=EVERY, guard=MigrationGuard(CLUSTER))
        stays = replay(loads, placement, None, every=EVERY)
        seconds, stayed = (CLUSTER.expert_seconds(each.rows, placement.slots_per_rank).sum() for each in (run, stays))
        assert seconds + sum(CLUSTER.migration_seconds(*change) for change in run.changes) <= stayed
        if workload in ("W2", "W6"):
            assert run.imbalance.mean() < stays.imbalance.mean() / 1.5
