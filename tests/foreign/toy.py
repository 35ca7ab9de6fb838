"""The training that the scripts in `patterns/` share: a small MoE model in float64 on points of three classes."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.models import DIM, Block, RoutedExperts


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = (Block(RoutedExperts()) for _ in range(2))
        super().__init__(nn.Linear(5, DIM), nn.Tanh(), *blocks, nn.Linear(DIM, 3))


def points(seed: int = 0, number: int = 48, batch_size: int = 4) -> DataLoader:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 5, dtype=torch.float64, generator=draws)
    return DataLoader(TensorDataset(x, x.argmax(1) % 3), batch_size=batch_size)


def build(
    model: nn.Module | None = None, optimizer: type = torch.optim.AdamW, **data: Any
) -> tuple[nn.Module, Any, DataLoader, Any]:
    """Return model, optimizer, loader and scheduler."""
    model = (Model() if model is None else model).double()
    optimizer = optimizer(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
    return model, optimizer, points(**data), scheduler
