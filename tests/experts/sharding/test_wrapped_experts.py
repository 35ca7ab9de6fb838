"""Experts inside wrappers that give the attributes of the module within, as PEFT's and torch.compile's do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tests.integrations.accelerate.test_expert_parallel import BATCH, Model, by_id, shares, together
from tests.support.equality import assert_equal_rows
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


class SavedModule(nn.Module):
    """As PEFT's `modules_to_save`: a frozen original beside the trained copy, whose attributes it gives."""

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


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS = {"bare": lambda module: module, "saved": SavedModule, "compiled": compiled}


def gradients(wrapper: str, frozen: bool) -> dict[str, Tensor]:
    """Of one backward, by name and id of row; experts may be `frozen` until they are prepared."""
    torch.compiler.set_stance("force_eager")  # what is tested is the wrapper
    model = Model().double()
    for block in model.blocks:
        block.experts = WRAPPERS[wrapper](block.experts)
        if frozen:
            block.experts.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    accelerator = Accelerator(cpu=True)
    prepared, _ = ExpertParallel(accelerator).prepare(model, optimizer)
    if frozen:
        model.requires_grad_(True)
    x = torch.randn(BATCH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    accelerator.backward(prepared(x[shares(1)[0]]).square().sum() * accelerator.num_processes)
    return by_id(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)


@pytest.mark.parametrize(("wrapper", "frozen"), [("saved", False), ("compiled", False), ("bare", True)])
def test_gradients_of_wrapped_and_unfrozen_experts_equal_one_process(wrapper: str, frozen: bool) -> None:
    (expected,) = run_distributed(gradients, 1, wrapper, frozen)
    assert any(value.any() for name, value in expected.items() if "experts" in name)
    assert_equal_rows(together(run_distributed(gradients, 2, wrapper, frozen)), expected, 1e-10)


def test_shard_experts_raises_if_rows_would_be_taken_twice() -> None:
    sharded, shared = Model(), Model()
    shard_experts(sharded)
    shared.blocks[1].experts.up = shared.blocks[0].experts.up
    for model, words in ((sharded, "'blocks.0.experts' are sharded already"), (shared, "share a parameter")):
        with pytest.raises(UserError, match=words):
            shard_experts(model)
