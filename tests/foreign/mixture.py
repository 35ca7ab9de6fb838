"""What the scripts in `patterns/` train: a small mixture in float64 on points of three classes."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.accelerate.test_expert_parallel import Model


def mixture() -> nn.Module:
    return Model().double()


def points(seed: int = 0, number: int = 48, batch_size: int = 4) -> DataLoader:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 5, dtype=torch.float64, generator=draws)
    return DataLoader(TensorDataset(x, x.argmax(1) % 3), batch_size=batch_size)
