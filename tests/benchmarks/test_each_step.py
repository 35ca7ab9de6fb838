"""Weights that are borrowed for a step, and what the lab makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.placement.each_step import borrow, try_each_step
from tests.experts.placement.placements import placements
from toolkit.experts.placement.loads import shares
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.lab.report import STAY, Rules, case_of_workload, try_planner
from toolkit.lab.workloads import Sizes


def test_a_hot_expert_is_divided_exactly_and_an_even_load_borrows_nothing():
    plan = borrow(np.array([70, 10, 10, 10]), contiguous(4, 2), 1)
    # Rank 0 has 80 and rank 1 20: 30 of expert 0's 70 rows go there.
    assert plan.share_ER[0].tolist() == pytest.approx([40 / 70, 30 / 70])
    assert plan.borrowed_RR.tolist() == [[0, 1], [0, 0]]
    even = borrow(np.array([10, 10, 10, 10]), contiguous(4, 2), 1)
    assert (even.share_ER == shares(contiguous(4, 2))).all()
    assert not even.borrowed_RR.any()


@given(placements(replicas=False), st.integers(0, 3), st.integers(0, 1000))
def test_no_row_is_lost_no_slot_is_used_twice_and_no_rank_is_busier(home: ExpertPlacement, spare: int, seed: int):
    load_E = np.random.default_rng(seed).integers(0, 50, home.num_experts)
    plan = borrow(load_E, home, spare)
    assert plan.share_ER.sum(1) == pytest.approx(np.ones(home.num_experts))
    assert (plan.share_ER >= -1e-12).all()
    assert (plan.borrowed_RR.sum(0) <= spare).all()
    before, after = load_E @ shares(home), load_E @ plan.share_ER
    assert after.max() <= before.max() * (1 + 1e-9)
    assert after.sum() == pytest.approx(load_E.sum())


def test_the_lab_replays_balancing_in_each_step_beside_planners():
    rules = Rules(every=5)
    hot = case_of_workload("W2", Sizes(steps=12, ranks=4, experts=16, assignments=4096))
    stay = try_planner(hot, STAY, guarded=False, rules=rules)
    borrowed, rebuilt = (try_each_step(hot, kind, rules=rules) for kind in ("borrow", "rebuild"))
    assert borrowed["imbalance"] < 1.01 < rebuilt["imbalance"] < 1.2 < stay["imbalance"]
    # Each of 20 slots gets weights and returns gradients, three quarters of them from and to other ranks.
    weights = hot.weight_bytes[0]
    assert rebuilt["MB a step"] == pytest.approx(2 * 20 * 0.75 * weights / 1e6)
    assert 0 < borrowed["MB a step"] <= 2 * 4 * weights / 1e6
