"""CostModel that a run measures in itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.placement.cost_model import measured_cost_model


def test_the_cost_model_of_a_layer_is_that_of_its_tensors_and_steps():
    stacked = [nn.Parameter(torch.zeros(4, 3, 5)), nn.Parameter(torch.zeros(4, 7, dtype=torch.bfloat16))]
    optimizer = torch.optim.AdamW(stacked)

    def cost_model() -> tuple[int, int]:
        found = measured_cost_model(stacked, optimizer, step_seconds=0.5, rows=1000, expert_share=0.4)
        assert found.seconds_per_row == pytest.approx(0.5 * 0.4 / 1000)
        return found.weight_bytes, found.optimizer_bytes

    weights = 3 * 5 * 4 + 7 * 2
    assert cost_model() == (weights, 0)
    for parameter in stacked:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # Two moments each, of the parameter's type; the step's number is of no expert.
    assert cost_model() == (weights, 2 * weights)
    assert measured_cost_model(stacked, None, step_seconds=0.0, rows=0).seconds_per_row == 0.0
