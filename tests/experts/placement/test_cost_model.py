"""CostModel that a run measures in itself."""

from __future__ import annotations

import pytest

from toolkit.experts.placement.cost_model import measured_cost_model

EXPERT = {"weight_bytes": 30, "optimizer_bytes": 60}


def test_a_row_has_its_part_of_the_step():
    found = measured_cost_model(step_seconds=0.5, rows=1000, expert_share=0.4, **EXPERT)
    assert found.seconds_per_row == pytest.approx(0.5 * 0.4 / 1000)
    assert (found.weight_bytes, found.optimizer_bytes) == (30, 60)
    assert measured_cost_model(step_seconds=0.0, rows=0, **EXPERT).seconds_per_row == 0.0
