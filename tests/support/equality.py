"""Equality up to rounding: one measure for all comparisons of many processes with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from toolkit.experts.parallel.ownership import local_rows, ownership_of

IN_FLOAT64 = 1e-9
"""How far apart, relatively, two runs `in_float64` may be after some dozens of steps."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Create and train in float64, even if data are float32 or code calls `Tensor.float`.

    In float32, processors round differently, and an optimizer that divides by the gradient's size amplifies the
    differences to full steps: after some steps two correct runs are further apart than many bugs would bring them. In
    float64 the errors are a billion times smaller.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    widening = register_module_forward_pre_hook(_widen)
    try:
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        widening.remove()
        torch.set_default_dtype(before)


def _widen(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def assert_equal_rows(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Assert that each row, "<parameter>/<id>", differs by at most `tolerance` times its parameter's norm."""
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
    """Whether every replicated parameter has the same bits on all ranks, every owned one on its expert DP group, and
    every shard on all ranks that have it.

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
