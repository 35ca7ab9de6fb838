"""Buffers that a module lists as constant are not copied from the first process, as DDP does with others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from toolkit.integrations.accelerate.prepare import prepare


class Memory(nn.Module):
    constant_buffers = ("table",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.full((2,), float(dist.get_rank())))
        self.register_buffer("count", torch.full((2,), float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def buffers_after_a_step() -> tuple[list[float], list[float]]:
    model = nn.Sequential(Memory())
    wrapped, _ = prepare(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(torch.ones(2)).sum().backward()
    return model[0].table.tolist(), model[0].count.tolist()


def test_constant_buffers_are_not_copied_and_others_are():
    assert run_distributed(buffers_after_a_step, 2) == [([0, 0], [0, 0]), ([1, 1], [0, 0])]
