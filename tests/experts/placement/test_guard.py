"""The guard accepts the plans that pay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard, plan_layer
from toolkit.experts.placement.loads import Window, window_of
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


def window(*loads: np.ndarray) -> Window:
    """Return a window with a part of ten steps for each load."""
    return Window(np.stack(loads), np.full(len(loads), 10))


STEADY = window(*[UNEVEN] * 4)


def takes(planned: Window, cost_model: CostModel = COST_MODEL, **choices: Any) -> bool:
    """Return whether a guard accepts `PLAN`, from a planner that always returns it."""
    return MigrationGuard(cost_model).accepts(PLAN, NOW, planned, lambda *_: PLAN, **choices)


def costing(seconds: float) -> CostModel:
    """Return a cost model by which the plan's migration takes `seconds`."""
    return replace(COST_MODEL, bytes_per_second=100.0 / seconds)


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


def test_guard_accepts_in_the_first_window_that_has_a_spread():
    assert takes(STEADY)
    assert not takes(window(*[UNEVEN] * 3))
    assert not MigrationGuard(COST_MODEL).accepts(NOW, NOW, STEADY, lambda *_: PLAN)


def test_guard_accepts_plans_that_save_one_and_a_half_times_their_migration():
    # The plan saves 3 s a step, 120 s in the next window.
    assert takes(STEADY, costing(79.9))
    assert not takes(STEADY, costing(80.1))


@pytest.mark.parametrize(
    ("planned", "cost_model", "reason"),
    [
        (window(UNEVEN), COST_MODEL, "a window of fewer than 4 steps does not show how loads change"),
        (
            window(UNEVEN, REVERSED, UNEVEN, REVERSED),
            COST_MODEL,
            "its gain cannot be told from how the loads change within a window",
        ),
        (window(*[np.array([1.004, 1.004, 1.0, 1.0])] * 4), COST_MODEL, "it saves less than 0.50% of the time"),
        (
            STEADY,
            costing(80.1),
            "until the next plan it saves 1.2e+05 ms, which is less than 1.5 times the 8.01e+04 ms",
        ),
    ],
)
def test_guard_counts_refused_plans_and_says_why(planned: Window, cost_model: CostModel, reason: str):
    guard = MigrationGuard(cost_model)
    guard.accepts(NOW, NOW, planned, lambda *_: PLAN)
    assert guard.refused == 0
    for refused in (1, 2):
        assert not guard.accepts(PLAN, NOW, planned, lambda *_: PLAN)
        assert guard.refused == refused
        assert guard.reason.startswith(reason)


def test_predicted_gain_is_that_of_a_plan_from_the_earlier_half_in_the_later_one():
    heard = []

    def planner(load_E: Any, current: ExpertPlacement) -> ExpertPlacement:
        heard.append((load_E.tolist(), current))
        return PLAN

    guard = MigrationGuard(COST_MODEL)
    # 3, 6 and 3 s a step in the later half: a mean of 4 with a standard error of 1.
    loads = window(REVERSED, 3 * REVERSED, 2 * REVERSED, UNEVEN, 2 * UNEVEN, UNEVEN)
    assert guard.predicted_gain(NOW, loads, planner) == pytest.approx(4.0 - 2.0)
    assert heard == [((2 * REVERSED).tolist(), NOW)]


def test_window_has_equal_parts_whose_mean_is_that_of_its_steps():
    loads = np.random.default_rng(0).random((21, 4))
    whole = window_of(loads)
    assert whole.steps_S.tolist() == [3] * 5 + [2] * 3
    assert whole.steps == 21
    np.testing.assert_allclose(whole.load_E, loads.mean(0))
    np.testing.assert_allclose(whole.load_SE[[0, 7]], [loads[:3].mean(0), loads[19:].mean(0)])
    earlier, later = whole.halves()
    np.testing.assert_allclose([earlier.load_E, later.load_E], [loads[:12].mean(0), loads[12:].mean(0)])
    assert window_of(loads[:3]).steps_S.tolist() == [1] * 3


EVEN = window(*[np.array([2.0, 2.0, 2.0, 2.0])] * 4)
TOGETHER = np.array([[[0, 2], [1, 3]], [[2, 0], [3, 1]]])
"""Of two ranks with two tokens each: experts 0 and 2 are chosen together, so under NOW each token visits two ranks."""


def test_guard_counts_what_a_plan_saves_of_the_exchange_of_rows():
    for row_bytes, choices, taken in ((100, TOGETHER, True), (100, None, False), (0, TOGETHER, False)):
        assert takes(EVEN, replace(COST_MODEL, row_bytes=row_bytes), choices_PTK=choices) == taken


def test_plan_layer_without_a_guard_applies_every_change():
    crossed = ExpertPlacement(((2, 1), (0, 3)))
    assert plan_layer(swap, STEADY, NOW) == crossed
    assert plan_layer(swap, STEADY, crossed) is None


# --- replayed loads ----------------------------------------------------------------------------------------------

EXPERT = 3 * 2048 * 1024
"""Parameters of an expert: bf16 weights; moments and master weights in float32."""
CLUSTER = CostModel(seconds_per_row=1e-6, bytes_per_second=25e9, weight_bytes=2 * EXPERT, optimizer_bytes=12 * EXPERT)
EVERY = 20


@pytest.mark.parametrize("workload", WORKLOADS)
def test_guarded_planner_is_at_most_two_percent_worse_than_no_plans_over_two_plans(workload: str):
    loads, blocks = WORKLOADS[workload](Sizes(steps=400)), contiguous(64, 8)
    for planner, start in ((swap, blocks), (lpt, blocks), (replicate, with_spare_slots(blocks, 1))):
        run = replay(loads, start, planner, every=EVERY, guard=MigrationGuard(CLUSTER))
        assert worst_span(loads, run, CLUSTER) <= 1.02
        if workload in ("W2", "W6"):
            assert run.imbalance.mean() < replay(loads, start, None, every=EVERY).imbalance.mean() / 1.5
