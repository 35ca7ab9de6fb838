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
from tests.experts.models import make_layer
from tests.integrations.accelerate.toy import Toy, ToyLoop, error_of
from toolkit import experts
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.state.random_states import random_states, restore_random_states
from toolkit.experts.state.state_dict import whole_state_dict


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def save_with_accelerate(folder: Path, placement: str, dense: str) -> tuple[dict[str, Tensor], str]:
    """Save the model; return the result of `get_state_dict` and the error of `state_dict`."""
    loop = ToyLoop(placement=placement, spare_slots=1, dense=dense)
    accelerator, model = loop.accelerator, loop.raw
    if dense == "ddp":  # FSDP2's parameters load sharded values only
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(Toy().state_dict())
    accelerator.save_model(loop.model, folder)
    other = nn.Linear(2, 2)  # as without experts; FSDP2 gathers on rank 0
    assert accelerator.get_state_dict(other).keys() == (
        set() if dense == "fsdp2" and accelerator.process_index else other.state_dict().keys()
    )
    return accelerator.get_state_dict(loop.model), error_of(model.state_dict)


@pytest.mark.parametrize(
    ("world", "placement", "dense"), [(1, "shuffled", "ddp"), (2, "contiguous", "fsdp2"), (2, "replicas", "ddp")]
)
def test_accelerate_saves_all_experts(world: int, placement: str, dense: str, tmp_path: Path) -> None:
    (state, message), *others = run_distributed(save_with_accelerate, world, tmp_path, placement, dense)
    for found in (state, load_file(tmp_path / "model.safetensors")):
        assert_equal(found, Toy().state_dict())
    assert all(other == ({}, message) for other in others)
    assert "whole_state_dict(model)" in message


def states_of_layer(stride: int) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Load a sharded layer; return its full state, the part of this rank, and the error of `state_dict`."""
    layer = make_layer(8, 16, 4, 2, ep_size=2, ep_stride=stride, placement="round_robin")
    layer.experts.up.data.zero_()
    nn.ModuleList([layer]).load_state_dict(nn.ModuleList([make_layer(8, 16, 4, 2, ep_size=1)]).state_dict())
    layer.load_state_dict(layer.state_dict(keep_vars=True))
    part = {name: value.detach().clone() for name, value in layer.state_dict(keep_vars=True).items()}
    return whole_state_dict(layer), part, error_of(layer.state_dict)


@pytest.mark.parametrize(("world", "stride"), [(2, 1), (4, 2)])
def test_state_dict_gathers_all_experts_on_rank_0(world: int, stride: int) -> None:
    expected = make_layer(8, 16, 4, 2).state_dict()
    (state, part, message), *others = run_distributed(states_of_layer, world, stride)
    assert_equal(state, expected)
    assert torch.equal(part["experts.up"], expected["experts.up"][[0, 2]])
    assert all(other == {} for other, _, _ in others)
    assert message.startswith("model.state_dict(): it would have the experts of this rank")


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
