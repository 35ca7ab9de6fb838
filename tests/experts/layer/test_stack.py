"""What one expert of a stack takes."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.experts.layer.stack import ExpertStack, optimizer_bytes, weight_bytes
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import contiguous


def test_bytes_of_an_expert_are_those_of_its_rows_and_of_their_moments():
    wide = nn.Parameter(torch.zeros(4, 3, 5))
    narrow = nn.Parameter(torch.zeros(4, 7, dtype=torch.bfloat16))
    stack = ExpertStack({"wide": wide, "narrow": narrow}, contiguous(4, 1), ExpertGroups())
    optimizer = torch.optim.AdamW([wide, narrow])
    weights = 3 * 5 * 4 + 7 * 2
    assert (weight_bytes(stack), optimizer_bytes(stack, optimizer), optimizer_bytes(stack, None)) == (weights, 0, 0)
    for parameter in (wide, narrow):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # Two moments each, of the parameter's type; the step's number is of no expert.
    assert optimizer_bytes(stack, optimizer) == 2 * weights
