"""Weights of a model with sharded experts are gathered whole; a state dict of one rank's part raises."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.integrations.accelerate.test_expert_parallel import Model, place
from tests.support.helpers import run_distributed
from toolkit import experts
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.state.state_dict import whole_state_dict
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


def refusal(model: nn.Module) -> str:
    with pytest.raises(UserError) as error:
        model.state_dict()
    return str(error.value)


def saved(folder: Path, kind: str, dense: Literal["ddp", "fsdp2"]) -> tuple[dict[str, Tensor], str]:
    """What `get_state_dict` returns, and how `state_dict` is refused; `save_model` writes `folder`."""
    accelerator, model = Accelerator(cpu=True), Model()
    experts = ExpertParallel(accelerator, placement=place(kind), spare_slots=1, dense=dense)
    prepared, _ = experts.prepare(model, torch.optim.SGD(model.parameters()))
    if dense == "ddp":  # FSDP2's parameters take what was sharded only
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(Model().state_dict())
    accelerator.save_model(prepared, folder)
    other = nn.Linear(2, 2)
    assert accelerator.get_state_dict(other).keys() == other.state_dict().keys(), "of a model that is not sharded"
    return accelerator.get_state_dict(prepared), refusal(model)


@pytest.mark.parametrize(
    ("world", "kind", "dense"), [(1, "shuffled", "ddp"), (2, "blocks", "fsdp2"), (2, "copies", "ddp")]
)
def test_accelerate_saves_the_whole_model(world: int, kind: str, dense: str, tmp_path: Path) -> None:
    (state, said), *others = run_distributed(saved, world, tmp_path, kind, dense)
    expected = Model().state_dict()
    for found in (state, load_file(tmp_path / "model.safetensors")):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(other == ({}, said) for other in others)
    assert "whole_state_dict(model)" in said


def layer_of_ours(groups: ExpertGroups | None = None) -> nn.Module:
    torch.manual_seed(0)
    return make_moe(8, 16, 4, 2, groups=groups, placement="round_robin")


def spread_layer_of_ours(stride: int) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    layer = layer_of_ours(make_expert_groups(2, ep_stride=stride))
    layer.experts.up.data.zero_()
    nn.ModuleList([layer]).load_state_dict(nn.ModuleList([layer_of_ours()]).state_dict())
    layer.load_state_dict(layer.state_dict(keep_vars=True))
    part = {name: value.detach().clone() for name, value in layer.state_dict(keep_vars=True).items()}
    return whole_state_dict(layer), part, refusal(layer)


@pytest.mark.parametrize(("world", "stride"), [(2, 1), (4, 2)])
def test_layer_is_gathered_whole_and_its_part_raises(world: int, stride: int) -> None:
    expected = layer_of_ours().state_dict()
    (whole, part, said), *others = run_distributed(spread_layer_of_ours, world, stride)
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    assert torch.equal(part["experts.up"], expected["experts.up"][[0, 2]])
    assert all(nothing == {} for nothing, _, _ in others)
    assert said.startswith("model.state_dict(): it would have the experts of this rank")


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
