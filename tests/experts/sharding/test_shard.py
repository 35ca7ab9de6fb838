"""Sharded experts inside wrappers, in evaluation mode, with shared parameters, and with uneven calls."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import Toy, ToyLoop, samples
from tests.parity.models import RoutedExperts
from tests.parity.outcome import Rows, gathered, rows_by_id
from tests.support.equality import assert_equal_rows
from toolkit import experts
from toolkit.errors import UserError
from toolkit.experts.sharding.join import join_forwards

EXPERTS, DIM, TOKENS = 4, 6, 16


@pytest.mark.parametrize("place", ["router", "moe", "view"])
def test_shard_experts_raises_for_parameters_shared_with_a_router(place: str):
    if place == "moe":
        layer = experts.make_moe(DIM, 8, EXPERTS, 2)
        model: Any = nn.Sequential(layer)
        layer.router.table = layer.experts.up
    else:
        model = RoutedExperts(EXPERTS, DIM)
        table = model.experts.up
        model.gate.table = nn.Parameter(table.data) if place == "view" else table
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(UserError, match=r"share a parameter with '.*(gate|router)\.table'"):
        experts.shard_experts(model, experts.make_expert_groups(1))
    assert [dict(vars(module)) for module in model.modules()] == before


def join_with_weights(dtype: torch.dtype) -> int:
    model, calls = RoutedExperts(EXPERTS, DIM), 1 + 2 * dist.get_rank()
    experts.shard_experts(model, experts.make_expert_groups(2))
    with join_forwards([model.experts], [model.experts.expert_stack]):
        for _ in range(calls):
            model.experts(torch.randn(3, DIM), torch.tensor([[0, 3]] * 3), torch.ones(3, 2, dtype=dtype))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_join_supports_routing_weights_of_any_dtype(dtype: torch.dtype):
    assert run_distributed(join_with_weights, 2, dtype) == [1, 3]


def test_sharded_model_in_eval_mode_counts_forward_passes_with_gradients():
    model = nn.ModuleList([RoutedExperts(EXPERTS, DIM), experts.make_moe(DIM, 8, EXPERTS, 2)]).eval()
    stacks = experts.shard_experts(model)
    for block in model:
        block(torch.randn(TOKENS, DIM))
        with torch.no_grad():
            block(torch.randn(TOKENS, DIM))
    assert [int(stack.log.load_E.sum()) for stack in stacks.values()] == [2 * TOKENS, 2 * TOKENS]


class SavedModule(nn.Module):
    """PEFT's `modules_to_save`: a frozen original and a trained copy, which provides the attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})
        self.original_module = module.requires_grad_(False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["modules_to_save"]["default"], name)  # type: ignore[index]

    def forward(self, *args: Any) -> Tensor:
        return self.modules_to_save["default"](*args)


WRAPPERS = {
    "frozen until prepared": lambda module: module.requires_grad_(False),
    "modules_to_save": SavedModule,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "compiled model": lambda module: module,
}


def gradients() -> dict[str, Rows]:
    """Return the gradients of one backward pass, by wrapper, parameter and row id."""
    torch.compiler.set_stance("force_eager")  # only the wrapper of torch.compile matters
    found = {}
    for name, wrap in WRAPPERS.items():
        model = Toy()
        for block in model.blocks:
            block.moe.experts = wrap(block.moe.experts)
        loop = ToyLoop(model=torch.compile(model, backend="eager") if name == "compiled model" else model)
        if name == "frozen until prepared":
            model.requires_grad_(True)
        loop.backward(samples())
        found[name] = gathered(rows_by_id(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad))
    return found


def test_gradients_of_wrapped_and_unfrozen_experts_equal_one_process() -> None:
    (expected,) = run_distributed(gradients, 1)
    ranks = run_distributed(gradients, 2)
    for wrapper, rows in expected.items():
        assert any(value.any() for name, value in rows.items() if "experts" in name)
        assert_equal_rows(gathered([rank[wrapper] for rank in ranks]), rows, 1e-10)


def test_shard_experts_raises_for_sharded_and_for_shared_experts() -> None:
    sharded, shared = Toy(), Toy()
    experts.shard_experts(sharded)
    shared.blocks[1].moe.experts.up = shared.blocks[0].moe.experts.up
    for model, message in ((sharded, "'blocks.0.moe.experts' are sharded already"), (shared, "share a parameter")):
        with pytest.raises(UserError, match=message):
            experts.shard_experts(model)
