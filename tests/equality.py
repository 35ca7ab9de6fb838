"""What is equal up to rounding: one measure for all comparisons of many processes with one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.parallel.ownership import ownership_of


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def assert_equal_rows(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each row, "<parameter>/<id>", differs by no more than `tolerance` times the norm of its whole parameter."""
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
    """Whether every replicated parameter has the same bits on all ranks, and every owned one on its expert DP group.

    A collective; the same answer on every rank.
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
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        agree = torch.minimum(agree, (low == high).all().to(agree))
    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
    return bool(agree)
