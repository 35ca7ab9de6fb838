r"""The numbers in tests/checkpoint/stored/0.1.0, a checkpoint that 0.1.0 wrote, and how it was made: on two processes,

    git worktree add ../toolkit-0.1.0 ba860a6d
    PYTHONPATH=../toolkit-0.1.0 torchrun --standalone --nproc-per-node 2 \
        tests/checkpoint/stored_numbers.py tests/checkpoint/stored/0.1.0

Every number follows from the name of its tensor and from its expert, so a test needs no second file to know it.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXTRA = {"step": 7, "note": "by 0.1.0"}


def build(make_moe: Callable[..., nn.Module], groups: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with buffers and experts, and its optimizer after one step."""
    mixture = make_moe(dim=4, hidden_dim=8, num_experts=4, top_k=2, groups=groups, placement="round_robin")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), mixture, nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def expected(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The name of each weight, buffer and state on this rank, the tensor itself, and the numbers that it had."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        ownership = getattr(tensor, "ownership", None)
        for key, value in [("weight", tensor.detach()), *optimizer.state.get(tensor, {}).items()]:
            if ownership is None or value.ndim == 0:
                numbers = _numbers(f"{name}.{key}", value.shape)
            else:
                rows = [_numbers(f"{name}.{key} of {uid}", value.shape[1:]) for uid in ownership.row_ids]
                numbers = torch.stack(rows)
            yield f"{name}.{key}", value, numbers.to(value.dtype)


def _numbers(name: str, shape: torch.Size) -> Tensor:
    """Sixteenths, which float32 has exactly, from one on that `name` decides."""
    return (zlib.crc32(name.encode()) % 4096 + torch.arange(math.prod(shape))).view(shape) / 16


if __name__ == "__main__":
    import toolkit as tk
    from toolkit.checkpoint.checkpoint import save_tensors

    dist.init_process_group("gloo")
    pair = build(tk.make_moe, tk.make_expert_groups(dist.get_world_size()))
    for _, there, then in expected(*pair):
        there.copy_(then)
    save_tensors(sys.argv[1], *pair, EXTRA)
    dist.destroy_process_group()
