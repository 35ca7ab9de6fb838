"""State dicts of models with sharded experts, whole or of one rank, and random states of checkpoints."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import Toy, ToyLoop, error_of
from toolkit import experts
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.collectives import world_size
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.state.random_states import random_states, restore_random_states


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def save_with_accelerate(folder: Path, placement: str, dense: str) -> tuple[dict[str, Tensor], str]:
    """Save the model; return the result of `get_state_dict` and the error of `state_dict`."""
    groups = make_expert_groups(2, ep_stride=2) if world_size() == 4 else None
    loop = ToyLoop(placement=placement, spare_slots=1, dense=dense, groups=groups)
    accelerator, model = loop.accelerator, loop.raw
    if dense == "ddp":  # FSDP2's parameters load sharded values only
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(Toy().state_dict())
        if groups is not None:
            model.load_state_dict(model.state_dict(keep_vars=True))  # the part of this rank
    accelerator.save_model(loop.model, folder)
    other = nn.Linear(2, 2)  # as without experts; FSDP2 gathers on rank 0
    assert accelerator.get_state_dict(other).keys() == (
        set() if dense == "fsdp2" and accelerator.process_index else other.state_dict().keys()
    )
    return accelerator.get_state_dict(loop.model), error_of(model.state_dict)


@pytest.mark.parametrize(
    ("world", "placement", "dense"),
    [(1, "shuffled", "ddp"), (2, "contiguous", "fsdp2"), (2, "replicas", "ddp"), (4, "shuffled", "ddp")],
)
def test_accelerate_saves_all_experts(world: int, placement: str, dense: str, tmp_path: Path) -> None:
    (state, message), *others = run_distributed(save_with_accelerate, world, tmp_path, placement, dense)
    for found in (state, load_file(tmp_path / "model.safetensors")):
        assert_equal(found, Toy().state_dict())
    assert all(other == ({}, message) for other in others)
    assert "whole_state_dict(model)" in message


def save_after_unequal_steps(folder: Path) -> None:
    layer = make_moe(8, 16, 4, 2, groups=make_expert_groups(2))
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(6, 8)).sum().backward()
    optimizer.step()
    for parameter in layer.experts.parameters():
        optimizer.state[parameter]["step"] += 2 * (1 - dist.get_rank())
    experts.save(folder, nn.ModuleDict({"moe": layer}), optimizer)


def test_load_of_rows_with_unequal_steps_takes_the_largest(tmp_path: Path) -> None:
    run_distributed(save_after_unequal_steps, 2, tmp_path / "saved")
    layer = make_moe(8, 16, 4, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    experts.load(tmp_path / "saved", nn.ModuleDict({"moe": layer}), optimizer)
    assert [float(optimizer.state[parameter]["step"]) for parameter in layer.experts.parameters()] == [3, 3]


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_restored_random_states_repeat_draws_of_python_numpy_and_torch():
    states = json.loads(json.dumps(random_states()))
    expected = draw()
    assert draw() != expected
    restore_random_states(states)
    assert draw() == expected
