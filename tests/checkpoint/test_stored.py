"""Checkpoints of earlier versions load in this one, with exactly the numbers that they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.checkpoint.stored_numbers import EXTRA, build, expected
from tests.support.helpers import run_distributed
from toolkit import experts
from toolkit.commands import main

STORED = Path(__file__).parent / "stored" / "0.1.0"


def load() -> tuple[dict[str, Any], dict[str, bool]]:
    """What was saved beside the tensors, and the name of each tensor with whether it has its numbers."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, optimizer = build(experts.make_moe, experts.make_expert_groups(world))
    extra = experts.load(STORED, model, optimizer)
    return extra, {name: torch.equal(there, then) for name, there, then in expected(model, optimizer)}


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_checkpoint_of_0_1_has_its_numbers_on_any_number_of_processes(processes: int):
    for extra, found in run_distributed(load, processes):
        assert extra == EXTRA
        assert {"2.experts.up.exp_avg_sq", "2.experts.down.step", "1.num_batches_tracked.weight"} <= found.keys()
        assert {name for name, same in found.items() if not same} == set()


def test_export_writes_it(tmp_path: Path):
    assert main(["checkpoint", "export", str(STORED), str(tmp_path / "weights.safetensors")]) == 0
    weights = load_file(tmp_path / "weights.safetensors")
    pair = build(experts.make_moe, experts.make_expert_groups(1))
    wanted = {name.removesuffix(".weight"): then for name, _, then in expected(*pair) if name.endswith(".weight")}
    assert weights.keys() == wanted.keys()
    assert {name for name, tensor in weights.items() if not torch.equal(tensor, wanted[name])} == set()
