"""One decision about one layer: stay, go, or go back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolkit.errors import UserError
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.experts.placement.plan import plan_layer

BLOCKS = contiguous(4, 2)
CROSSED = ExpertPlacement(((2, 1), (0, 3)))
UNEVEN, REVERSED = torch.tensor([4, 4, 1, 1]), np.array([1.0, 4.0, 4.0, 1.0])


def test_without_a_guard_a_plan_that_changes_anything_is_taken():
    assert plan_layer("swap", UNEVEN, BLOCKS, steps=10) == CROSSED
    assert plan_layer("swap", UNEVEN, CROSSED, steps=10) is None
    assert plan_layer("swap", UNEVEN, BLOCKS, steps=10, target=1.7) is None
    assert plan_layer(lambda load_E, current: CROSSED, UNEVEN, BLOCKS, steps=10) == CROSSED  # noqa: ARG005


def test_with_a_guard_plans_prove_themselves_first_and_are_taken_back_when_they_fail():
    guard = MigrationGuard(CostModel(seconds_per_row=1.0, bytes_per_second=1e3, weight_bytes=1))

    def stay(load_E: object, current: ExpertPlacement) -> ExpertPlacement:  # noqa: ARG001
        return current

    for _ in range(2):
        assert plan_layer("swap", UNEVEN, BLOCKS, guard=guard, steps=10) is None
    assert plan_layer("swap", UNEVEN, BLOCKS, guard=guard, steps=10) == CROSSED
    assert plan_layer(stay, REVERSED, CROSSED, guard=guard, steps=10) is None
    assert plan_layer(stay, REVERSED, CROSSED, guard=guard, steps=10) == BLOCKS


def test_an_unknown_planner_is_refused():
    with pytest.raises(UserError, match="planner 'luck' is not known"):
        plan_layer("luck", UNEVEN, BLOCKS, steps=10)
