"""Replays count what a planner would have done."""

import numpy as np

from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.lab.replay import Replay, replay, worst_span

# Two steps to a window; experts 0 and 1 are hot in the first, 0 and 2 in the second and third.
LOADS_TE = np.array([[4, 4, 1, 1]] * 2 + [[4, 1, 4, 1]] * 3)
BLOCKS, CROSSED = contiguous(4, 2), ExpertPlacement(((0, 2), (1, 3)))


def cross(load_E: np.ndarray, current: ExpertPlacement) -> ExpertPlacement:
    """Sees the mean of a window, two steps of one kind."""
    assert load_E.tolist() == (LOADS_TE[0] if current == BLOCKS else LOADS_TE[2]).tolist()
    return CROSSED


def test_doing_nothing_leaves_experts_where_they_are():
    run = replay(LOADS_TE, BLOCKS, None, every=2)
    assert run.imbalance_T.tolist() == [1.6, 1.6, 1.0, 1.0, 1.0]
    assert run.placements == (BLOCKS,) * 3
    assert run.experts_moved == [0, 0]


def test_a_plan_is_in_force_from_the_window_after_the_one_it_was_made_for():
    run = replay(LOADS_TE, BLOCKS, cross, every=2)
    assert run.load_TR.tolist() == [[8, 2], [8, 2], [8, 2], [8, 2], [8, 2]]
    assert run.placements == (BLOCKS, CROSSED, CROSSED)
    assert run.experts_moved == [2, 0]


def test_the_worst_span_of_two_plans_by_hand():
    cost_model = CostModel(seconds_per_row=1.0, bytes_per_second=100.0, weight_bytes=100)
    run = Replay(np.zeros((5, 2)), (BLOCKS, CROSSED, CROSSED), every=2)
    # Steps 2 to 4 take 8 s each instead of 5, and the first migration 1 s: 25 for 15.
    assert worst_span(LOADS_TE, run, cost_model) == 25 / 15
