"""Checkpoints of earlier versions load with exactly their values.

0.1.0 saved tests/checkpoint/stored/0.1.0 on two processes, after each tensor was set to its values in `expected`.
"""

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from toolkit import experts
from toolkit.commands import main

STORED = Path(__file__).parent / "stored" / "0.1.0"


def build(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with buffers and experts, and its optimizer after one step."""
    groups = experts.make_expert_groups(world_size)
    moe = experts.make_moe(dim=4, hidden_dim=8, num_experts=4, top_k=2, groups=groups, placement="round_robin")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), moe, nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def expected(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, tensor and stored values of each weight, buffer and optimizer state on this rank."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        ownership = getattr(tensor, "ownership", None)
        for key, value in [("weight", tensor.detach()), *optimizer.state.get(tensor, {}).items()]:
            if ownership is None or value.ndim == 0:
                values = values_of(f"{name}.{key}", value.shape)
            else:
                values = torch.stack(
                    [values_of(f"{name}.{key} of {uid}", value.shape[1:]) for uid in ownership.row_ids]
                )
            yield f"{name}.{key}", value, values.to(value.dtype)


def values_of(name: str, shape: torch.Size) -> Tensor:
    return (zlib.crc32(name.encode()) % 4096 + torch.arange(math.prod(shape))).view(shape) / 16


def load() -> tuple[dict[str, Any], dict[str, bool]]:
    """Return the extra state, and for each tensor whether it has its stored values."""
    pair = build(dist.get_world_size() if dist.is_initialized() else 1)
    extra = experts.load(STORED, *pair)
    return extra, {name: torch.equal(tensor, values) for name, tensor, values in expected(*pair)}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_checkpoint_of_0_1_loads_exactly_at_any_world_size(world_size):
    for extra, equal in run_distributed(load, world_size):
        assert extra == {"step": 7, "note": "by 0.1.0"}
        assert {"2.experts.up.exp_avg_sq", "2.experts.down.step", "1.num_batches_tracked.weight"} <= equal.keys()
        assert [name for name in equal if not equal[name]] == []


def test_export_of_checkpoint_of_0_1_has_the_stored_values(tmp_path):
    assert main(["checkpoint", "export", str(STORED), str(tmp_path / "weights.safetensors")]) == 0
    weights = load_file(tmp_path / "weights.safetensors")
    stored = {name.removesuffix(".weight"): v for name, _, v in expected(*build(1)) if name.endswith(".weight")}
    assert weights.keys() == stored.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, stored[name])] == []
