"""AdamW with the parameter groups that every recipe wants."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.config.run import OptimizerConfig
from toolkit.parallel.ownership import is_owned


def build_optimizer(model: nn.Module, *, lr: float, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW: matrices decay, vectors do not; owned parameters have groups of their own.

    Fused because at small batches the step is a matter of memory traffic, and this reads and writes each tensor once.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((is_owned(parameter), parameter.ndim >= 2), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": config.weight_decay * decays} for (_, decays), params in groups.items()],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
