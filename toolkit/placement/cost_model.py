"""The cost model of a running training, with which a guard compares the gain of a plan to the cost of migration."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from toolkit.placement.guard import CostModel

LINK_BYTES_PER_SECOND = 10e9
"""Assumed, not measured: nearly a network card of 100 Gbit/s. Links within a node are faster, so that the guard refuses
a few plans too many there."""
EXPERT_SHARE = 0.5
"""Assumed, not measured: the fraction of a step that grows with the rows of the busiest rank (experts' forward and
backward, and their transfers); the rest is attention, loss, optimizer. Too high a fraction overrates gains."""


def measured_cost_model(
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    *,
    step_seconds: float,
    rows: float,
    expert_share: float = EXPERT_SHARE,
    bytes_per_second: float = LINK_BYTES_PER_SECOND,
    seconds_per_migration: float = 0.0,
) -> CostModel:
    """CostModel of one layer with the stacked expert `parameters` (dimension 0: slots).

    `step_seconds`: the mean of steps that planned nothing. `rows`: routed copies in a step at the busiest rank, summed
    over all MoE layers, so that each row of this layer bears its part of the step. Ranks that decide alike need like
    prices: pass numbers that they agree on.
    """
    stacked = list(parameters)
    return CostModel(
        seconds_per_row=expert_share * step_seconds / max(rows, 1.0),
        bytes_per_second=bytes_per_second,
        weight_bytes=sum(_row_bytes(p) for p in stacked),
        optimizer_bytes=sum(state_bytes(p, optimizer) for p in stacked) if optimizer else 0,
        seconds_per_migration=seconds_per_migration,
    )


def _row_bytes(stacked: torch.Tensor) -> int:
    # Also on a rank that has no slot.
    return stacked.shape[1:].numel() * stacked.element_size()


def state_bytes(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer keeps for one row of `parameter`; 0 before its first step."""
    states = optimizer.state.get(parameter, {}).values()
    return sum(_row_bytes(s) for s in states if isinstance(s, torch.Tensor) and s.shape == parameter.shape)
