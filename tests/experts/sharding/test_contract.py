"""What experts of others must keep, so that they may be spread: refused in one line where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.transformers.mixtures import build
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.sharding.shard import require_experts, shard_experts
from toolkit.experts.sharding.waiting_rows import wait_for_rows

DIM, EXPERTS = 8, 4


class Experts(nn.Module):
    """As the contract has it."""

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
        (WeightsItsInput, "multiply the outputs of experts by their weights"),
        (HasBuffers, "buffer 'scale' is not moved with them.*parameters with a row for each expert"),
        (HasTables, "parameters with a row for each expert"),
        (ReturnsTwo, "return a tuple: return one tensor"),
        (ChoosesTokens, "cannot be called with hidden .* where tokens choose experts"),
    ],
)
def test_experts_that_spreading_would_change_are_refused_in_one_line(experts: type[nn.Module], words: str):
    model = model_of(experts)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=words) as refused:
        shard_experts(model, ExpertGroups())
    assert "\n" not in str(refused.value)
    assert "the experts at 'experts'" in str(refused.value)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("is_identity", [True, False])
@pytest.mark.parametrize(("number", "other"), [(2, 0), (2, 1), (5, 2), (5, 4), (21, 0), (21, 7), (21, 20)])
def test_an_expert_that_is_an_identity_or_is_skipped_is_found_at_any_id(number: int, other: int, is_identity: bool):
    model = model_of(OneIsOther)
    experts: Any = model.get_submodule("experts")
    experts.num_experts, experts.other, experts.is_identity = number, other, is_identity
    experts.up = nn.Parameter(torch.randn(number, DIM, 12))
    experts.down = nn.Parameter(torch.randn(number, 12, DIM))
    with pytest.raises(UserError, match="compute something else where each is on a rank of its own"):
        shard_experts(model, ExpertGroups())


def leave_rows_elsewhere(experts: nn.Module) -> None:
    rows = {name: parameter.detach() for name, parameter in experts.named_parameters(recurse=False)}
    for name, whole in rows.items():
        setattr(experts, name, nn.Parameter(torch.zeros(()).expand(whole.shape)))
    wait_for_rows(experts, lambda _, chosen: {name: whole[list(chosen)] for name, whole in rows.items()})


@pytest.mark.parametrize("is_identity", [True, False])
@pytest.mark.parametrize("other", [3, 4, 20])
def test_an_expert_that_is_an_identity_or_is_skipped_is_found_while_rows_are_elsewhere(other: int, is_identity: bool):
    model = model_of(OneIsOther)
    experts: Any = model.get_submodule("experts")
    experts.num_experts, experts.other, experts.is_identity = 21, other, is_identity
    experts.up, experts.down = nn.Parameter(torch.randn(21, DIM, 12)), nn.Parameter(torch.randn(21, 12, DIM))
    leave_rows_elsewhere(experts)
    with pytest.raises(UserError, match="compute something else where each is on a rank of its own"):
        shard_experts(model, ExpertGroups())
    assert all(parameter.untyped_storage().nbytes() == 4 for parameter in experts.parameters())


@pytest.mark.parametrize("family", ["llama4_text", "dbrx"])
def test_experts_that_are_adapted_pass_while_rows_are_elsewhere(family: str):
    model = build(family)
    for experts in require_experts(model).values():
        leave_rows_elsewhere(experts)
    shard_experts(model, ExpertGroups())


def test_a_buffer_with_a_row_per_expert_is_found_while_rows_are_elsewhere():
    class Scaled(HasBuffers):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 6
            self.up, self.down = nn.Parameter(torch.randn(6, DIM, 12)), nn.Parameter(torch.randn(6, 12, DIM))
            self.register_buffer("scale", torch.ones(6))

    model = model_of(Scaled)
    leave_rows_elsewhere(model.get_submodule("experts"))
    with pytest.raises(UserError, match="buffer 'scale' is not moved with them"):
        shard_experts(model, ExpertGroups())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_experts_that_keep_the_contract_are_left_as_they_were(dtype: torch.dtype):
    model = model_of(Experts).to(dtype)
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


def test_a_further_argument_is_refused():
    experts = model_of(Scales)["experts"]
    chosen = torch.randn(2, DIM), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    before = experts(*chosen)
    shard_experts(nn.ModuleDict({"experts": experts}), ExpertGroups())
    for call in (lambda: experts(*chosen, 3.0), lambda: experts(*chosen, scale=3.0)):
        with pytest.raises(UserError, match=r"experts Scales were called with more than hidden, .*attribute of the"):
            call()
    torch.testing.assert_close(experts(*chosen[:2], weights=chosen[2]), before)
