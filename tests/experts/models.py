"""A small MoE layer of another library: a linear router, and stacked experts in a loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StackedExperts(nn.Module):
    def __init__(self, dim: int, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, dim, width) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, dim) * width**-0.5)

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.compute(expert, hidden[token], weights[token, choice, None]))
        return out

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return (x @ self.up[expert]).tanh() @ self.down[expert] * weight


class Block(nn.Module):
    def __init__(self, dim: int, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = StackedExperts(dim, width, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, ids, weights)
