"""Equality of runs on several processes with a run on one process, up to rounding."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.experts.parallel.ownership import local_rows, ownership_of


def assert_equal_rows(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Assert that each row, "<parameter>/<id>", differs by at most `tolerance` times the norm of its parameter."""
    assert found.keys() == expected.keys()
    squares: dict[str, float] = {}
    for name, value in expected.items():
        parameter = name.partition("/")[0]
        squares[parameter] = squares.get(parameter, 0.0) + value.square().sum().item()
    for name, value in expected.items():
        difference = (found[name] - value).norm().item()
        assert difference <= tolerance * squares[name.partition("/")[0]] ** 0.5, name


@torch.no_grad()
def replicas_agree(model: nn.Module) -> bool:
    """Return whether replicas are bitwise identical: parameters, experts in their EP-DP group, replicated DTensors.

    A collective with the same result on every rank.
    """
    if not dist.is_initialized():
        return True
    agree = torch.ones((), device=next(model.parameters()).device)
    for parameter in model.parameters():
        ownership = ownership_of(parameter)
        group = None
        if ownership is not None and ownership.groups.ep_size > 1:
            group = ownership.groups.expert_dp_group
            if group is None:
                continue
        if isinstance(parameter, DTensor):
            if not parameter.placements[0].is_replicate():
                continue
            group = parameter.device_mesh.get_group(0)
        low, high = (local_rows(parameter.detach()).clone() for _ in range(2))
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        agree = torch.minimum(agree, (low == high).all().to(agree))
    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
    return bool(agree)
