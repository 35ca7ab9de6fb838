"""Experts modules that sharding would change raise, and others stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.transformers.families import build
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.sharding.find import require_experts
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.transformers.lazy_loading import load_lazily

DIM, EXPERTS = 8, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 12))
        self.down = nn.Parameter(torch.zeros(EXPERTS, 12, DIM))  # as some initialise them
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Any:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            y = self.compute(expert, hidden[token], weights[token, choice, None])
            out = out.index_add(0, token, y)
        return out

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return self.dropout(nn.functional.silu(x @ self.up[expert])) @ self.down[expert] * weight


class WeightsItsInput(Experts):
    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.silu(weight * x @ self.up[expert]) @ self.down[expert]


class HasBuffers(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(EXPERTS))

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return super().compute(expert, x, weight) * self.get_buffer("scale")[expert]


class HasTables(Experts):
    """A row for each expert in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(EXPERTS, DIM)

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return (x @ self.up[expert] @ self.down[expert] + self.bias.weight[expert]) * weight


class OneIsOther(Experts):
    """The expert `other` is another function than the rest, whatever rows are there."""

    other, is_identity = 0, True

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        if expert == self.other:
            return x * weight if self.is_identity else torch.zeros_like(x)
        return super().compute(expert, x, weight)


class ReturnsTwo(Experts):
    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Any:
        return super().forward(hidden, expert_ids, weights), expert_ids


class ChoosesTokens(Experts):
    """Expert choice: ids are tokens, a row for each expert."""

    def forward(self, hidden: Tensor, token_ids: Tensor, weights: Tensor) -> Any:
        tokens, weights = token_ids.view(self.num_experts, -1), weights.view(self.num_experts, -1, 1)
        return torch.cat([self.compute(e, hidden[tokens[e]], weights[e]) for e in range(self.num_experts)])


def model_of(experts: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"experts": experts()})


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (WeightsItsInput, "Multiply the outputs of experts by their weights"),
        (HasBuffers, "buffer 'scale' is not moved with them.*Keep what differs"),
        (HasTables, "parameters with a row for each expert"),
        (ReturnsTwo, "it returns a tuple"),
        (ChoosesTokens, "cannot be called with hidden"),
    ],
)
def test_check_experts_that_sharding_would_change_raises(experts: type[nn.Module], words: str):
    model = model_of(experts)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=f"the experts at 'experts'.*{words}"):
        shard_experts(model, ExpertGroups())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def leave_in_files(experts: nn.Module) -> None:
    rows = {name: parameter.detach() for name, parameter in experts.named_parameters(recurse=False)}
    for name, whole in rows.items():
        setattr(experts, name, nn.Parameter(torch.zeros(()).expand(whole.shape)))
    load_lazily(experts, lambda _, chosen: {name: whole[list(chosen)] for name, whole in rows.items()})


@pytest.mark.parametrize("is_identity", [True, False])
@pytest.mark.parametrize(
    ("number", "other", "lazily"), [(2, 0, False), (5, 4, False), (21, 7, False), (21, 3, True), (21, 20, True)]
)
def test_check_one_different_expert_raises_at_any_id(number: int, other: int, lazily: bool, is_identity: bool):
    model = model_of(OneIsOther)
    experts: Any = model.get_submodule("experts")
    experts.num_experts, experts.other, experts.is_identity = number, other, is_identity
    experts.up = nn.Parameter(torch.randn(number, DIM, 12))
    experts.down = nn.Parameter(torch.randn(number, 12, DIM))
    if lazily:
        leave_in_files(experts)
    sizes = [parameter.untyped_storage().nbytes() for parameter in experts.parameters()]
    with pytest.raises(UserError, match="compute something else when they are sharded"):
        shard_experts(model, ExpertGroups())
    assert [parameter.untyped_storage().nbytes() for parameter in experts.parameters()] == sizes


@pytest.mark.parametrize("family", ["llama4_text", "dbrx"])
def test_check_adapted_and_lazily_loaded_experts_pass(family: str):
    model = build(family)
    layers = require_experts(model)
    for experts in layers.values():
        leave_in_files(experts)
    assert shard_experts(model, ExpertGroups()).keys() == layers.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_leaves_values_random_state_and_mode(dtype: torch.dtype):
    model = model_of(Experts).to(dtype)
    model["experts"].register_buffer("unused", torch.ones(EXPERTS, dtype=dtype))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    shard_experts(model, ExpertGroups())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model["experts"].training
    assert model["experts"].num_experts == EXPERTS


class Scales(Experts):
    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, scale: float = 1.0) -> Any:
        return super().forward(hidden, expert_ids, weights) * scale


def test_sharded_experts_called_with_a_further_argument_raise():
    experts = model_of(Scales)["experts"]
    chosen = torch.randn(2, DIM), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    before = experts(*chosen)
    shard_experts(nn.ModuleDict({"experts": experts}), ExpertGroups())
    for call in (lambda: experts(*chosen, 3.0), lambda: experts(*chosen, scale=3.0)):
        with pytest.raises(TypeError):
            call()
    torch.testing.assert_close(experts(*chosen[:2], weights=chosen[2]), before)
