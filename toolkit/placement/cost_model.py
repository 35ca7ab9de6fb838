"""The cost model of a running training, with which a guard compares the gain of a plan to the cost of migration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from toolkit.placement.guard import CostModel

LINK_BYTES_PER_SECOND = 10e9
"""Assumed, not measured: nearly a network card of 100 Gbit/s. Links within a node are faster; there the guard refuses
a few plans too many."""
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

    `step_seconds`: the mean of steps that planned nothing. `rows`: assignments in a step at the busiest rank, summed
    over all MoE layers, so that each row of this layer has its part of the step. Pass equal
    numbers on all ranks, so that all ranks decide alike.
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


def link_bytes_per_second(
    group: dist.ProcessGroup | None, device: torch.device, *, megabytes: int = 16, repeats: int = 3
) -> float:
    """Measured bytes per second at which a rank of `group` sends to the next one while it receives from the one before:
    the median of `repeats`, of the slowest rank, hence the same on all. A collective. LINK_BYTES_PER_SECOND where there
    is no other rank."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if ranks == 1:
        return LINK_BYTES_PER_SECOND
    size = megabytes * 2**20
    me = dist.get_rank(group)
    sizes_out = [0] * ranks
    sizes_in = [0] * ranks
    sizes_out[(me + 1) % ranks] = sizes_in[(me - 1) % ranks] = size
    outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
    incoming = torch.empty_like(outgoing)
    seconds = []
    for _ in range(1 + repeats):
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, group=group)
        float(incoming[-1])  # waits for the device
        seconds.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(seconds[1:]), device=device)  # The first one opens connections.
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return size / float(slowest)
