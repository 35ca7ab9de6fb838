"""Training in float64, for comparisons up to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

IN_FLOAT64 = 1e-9
"""Largest relative difference of two equal runs under `in_float64` after dozens of steps."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Create and train models in float64, even if data are float32 or code calls `Tensor.float`.

    In float32, adaptive optimizers amplify rounding differences to full steps, so after a few steps two correct runs
    differ by more than many bugs would cause. In float64 the differences are a billion times smaller.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    hook = register_module_forward_pre_hook(_widen)  # type: ignore[arg-type]
    try:
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        hook.remove()
        torch.set_default_dtype(before)


def _widen(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
