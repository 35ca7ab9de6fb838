"""The check of experts modules: modules that compute differently when sharded raise, others are unchanged."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.support.families import build
from tests.parity.models import StackedExperts
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import contiguous
from toolkit.experts.sharding.check import check_experts
from toolkit.experts.sharding.find import require_experts
from toolkit.experts.sharding.found import FoundExperts
from toolkit.experts.sharding.shard import shard_experts
from toolkit.experts.sharding.sharded_experts import load_lazily

DIM, EXPERTS = 8, 4


class Experts(StackedExperts):
    """Experts with dropout, and output weights of zero, an initialization that some models use."""

    def __init__(self, num_experts: int = EXPERTS) -> None:
        super().__init__(num_experts, DIM)
        nn.init.zeros_(self.down)
        self.dropout = nn.Dropout(0.5)

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return self.dropout(nn.functional.silu(x @ self.up[expert] + self.up_bias[expert])) @ self.down[expert] * weight


class WeightsItsInput(Experts):
    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return super().compute(expert, x * weight, torch.ones(()))


class HasBuffers(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(EXPERTS))

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return super().compute(expert, x, weight) * self.scale[expert]


class HasTables(Experts):
    """Has a row per expert in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(EXPERTS, DIM)

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return super().compute(expert, x, weight) + self.bias.weight[expert] * weight


class SpecialExpert(Experts):
    """The expert with id `special` is the identity, or zero, whatever its weights."""

    special, is_identity = 0, True

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        if expert == self.special:
            return x * weight if self.is_identity else torch.zeros_like(x)
        return super().compute(expert, x, weight)


class ReturnsNaN(Experts):
    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return super().compute(expert, x, weight) * torch.nan


class ReturnsTwo(Experts):
    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Any:
        return super().forward(hidden, expert_ids, weights), expert_ids


class ChoosesTokens(Experts):
    """Expert choice: a row of token ids for each expert."""

    def forward(self, hidden: Tensor, token_ids: Tensor, weights: Tensor) -> Any:
        tokens, weights = token_ids.view(self.num_experts, -1), weights.view(self.num_experts, -1, 1)
        return torch.cat([self.compute(e, hidden[tokens[e]], weights[e]) for e in range(self.num_experts)])


class Scales(Experts):
    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, scale: float = 1.0) -> Any:
        return super().forward(hidden, expert_ids, weights) * scale


ERRORS = {
    WeightsItsInput: "Multiply the outputs of experts by their weights",
    HasBuffers: "buffer 'scale' is not moved with them.*Keep what differs",
    HasTables: "parameters with a row for each expert",
    ReturnsNaN: "compute something else when they are sharded",
    ReturnsTwo: "it returns a tuple",
    ChoosesTokens: "cannot be called with hidden",
}


@pytest.mark.parametrize(("experts", "message"), ERRORS.items())
def test_experts_that_compute_differently_when_sharded_raise(experts: type[nn.Module], message: str):
    model = nn.ModuleDict({"experts": experts()})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=f"the experts at 'experts'.*{message}"):
        shard_experts(model, ExpertGroups())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


class HasSharedNorm(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return self.norm(super().compute(expert, x, torch.ones(()))) * weight


def test_parameter_that_experts_of_two_ranks_share_raises_unless_frozen():
    model = nn.ModuleDict({"experts": HasSharedNorm()})
    layers, placements = require_experts(model), {"experts": contiguous(EXPERTS, 2)}
    with pytest.raises(UserError, match=r"all experts at 'experts' share 'norm.weight'.*Freeze it"):
        check_experts(model, layers, placements)
    model["experts"].norm.requires_grad_(False)
    nn.init.normal_(model["experts"].down)
    check_experts(model, layers, placements)


def make_lazy(found: FoundExperts) -> None:
    rows = {name: found.rows(parameter.detach(), form) for name, (parameter, form) in found.parameters().items()}
    for name, parameter in found.module.named_parameters(recurse=False):
        setattr(found.module, name, nn.Parameter(torch.zeros(()).expand(parameter.shape)))
    load_lazily(found.module, lambda _, chosen: {name: each[list(chosen)] for name, each in rows.items()})


@pytest.mark.parametrize("is_identity", [True, False])
@pytest.mark.parametrize(
    ("number", "special", "lazy"), [(2, 0, False), (5, 4, False), (21, 7, False), (21, 3, True), (21, 20, True)]
)
def test_special_expert_with_any_id_raises(number: int, special: int, lazy: bool, is_identity: bool):
    torch.manual_seed(0)
    experts = SpecialExpert(number)
    experts.special, experts.is_identity = special, is_identity
    nn.init.normal_(experts.down)
    model = nn.ModuleDict({"experts": experts})
    if lazy:
        make_lazy(require_experts(model)["experts"])
    sizes = [parameter.untyped_storage().nbytes() for parameter in experts.parameters()]
    with pytest.raises(UserError, match="compute something else when they are sharded"):
        shard_experts(model, ExpertGroups())
    assert [parameter.untyped_storage().nbytes() for parameter in experts.parameters()] == sizes


@pytest.mark.parametrize("family", ["llama4_text", "dbrx"])
def test_adapted_and_lazily_loaded_experts_pass(family: str):
    model = build(family)
    layers = require_experts(model)
    for experts in layers.values():
        make_lazy(experts)
    assert shard_experts(model, ExpertGroups()).keys() == layers.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_leaves_values_random_state_and_mode_unchanged(dtype: torch.dtype):
    model = nn.ModuleDict({"experts": Experts()}).to(dtype)
    model["experts"].register_buffer("unused", torch.ones(EXPERTS, dtype=dtype))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    shard_experts(model, ExpertGroups())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model["experts"].training
    assert model["experts"].num_experts == EXPERTS


def test_sharded_experts_called_with_another_argument_raise():
    experts = Scales()
    chosen = torch.randn(2, DIM), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    before = experts(*chosen)
    shard_experts(nn.ModuleDict({"experts": experts}), ExpertGroups())
    for call in (lambda: experts(*chosen, 3.0), lambda: experts(*chosen, scale=3.0)):
        with pytest.raises(TypeError):
            call()
    torch.testing.assert_close(experts(*chosen[:2], weights=chosen[2]), before)
