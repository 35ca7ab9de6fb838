"""What lies within the wrappers that Accelerate puts around an optimizer."""

from __future__ import annotations

import torch


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside `AcceleratedOptimizer`, or `optimizer` itself where it is not wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
