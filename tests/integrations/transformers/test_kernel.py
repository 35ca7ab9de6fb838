"""Our experts implementation computes what transformers' own loop over experts computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.transformers.families import EXPERTS, FAMILIES, awaken, config
from toolkit.experts.layer.feed_forward import GroupedFeedForward
from toolkit.experts.sharding.call import slots_of_rows
from toolkit.integrations.transformers import causal_lm, experts_modules, use_toolkit_kernel

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


def experts_of(family: str, dtype: torch.dtype) -> Any:
    use_toolkit_kernel()
    torch.manual_seed(0)
    model = awaken(causal_lm(config(family), dtype=dtype))
    return list(experts_modules(model).values())[-1]


def run(experts: Any, implementation: str, x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    experts.config._experts_implementation = implementation
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad()
    y = experts(x, ids, weights)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    assert x.grad is not None
    gradients = [p.grad.clone() for p in experts.parameters()]
    return [y.detach(), x.grad, *gradients] + ([weights.grad] if weights.grad is not None else [])


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.norm() > 0
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_the_loop_over_experts(family: str, dtype: torch.dtype):
    experts, draws = experts_of(family, dtype), torch.Generator().manual_seed(1)
    x = torch.randn(21, 16, dtype=dtype, generator=draws)
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=draws)[:2] for _ in range(21)])  # the last one gets none
    weights = torch.rand(21, 2, dtype=dtype, generator=draws)
    assert_close(run(experts, "toolkit", x, ids, weights), run(experts, "eager", x, ids, weights), TOLERANCE[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_say_how_many_each_slot_has_are_not_sorted(family: str):
    experts = experts_of(family, torch.float32)
    rows_per_slot = torch.tensor([3, 0, 4, 1, 2, 0, 5, 1])
    slots = slots_of_rows(rows_per_slot, 16)
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    expected = run(experts, "eager", x, slots.clone(), torch.ones(16, 1))
    assert_close(run(experts, "toolkit", x, slots, torch.ones(16, 1)), expected[:-1], 1e-6)


@pytest.mark.parametrize(("family", "fused"), [("mixtral", True), ("gpt_oss", False)])
def test_plain_experts_run_as_one_node(family: str, fused: bool, monkeypatch: pytest.MonkeyPatch):
    calls = []
    apply = GroupedFeedForward.apply
    monkeypatch.setattr(GroupedFeedForward, "apply", lambda *args: calls.append(1) or apply(*args))
    experts = experts_of(family, torch.float32)
    experts.config._experts_implementation = "toolkit"
    experts(torch.randn(4, 16), torch.tensor([[0, 1]] * 4), torch.ones(4, 2))
    assert bool(calls) is fused


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_computes_in_bfloat16_and_returns_what_came(family: str):
    experts = experts_of(family, torch.float32)
    x, ids, weights = torch.randn(8, 16), torch.tensor([[0, 1]] * 8), torch.full((8, 2), 0.5)
    expected = run(experts, "eager", x, ids, weights)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        experts.config._experts_implementation = "toolkit"
        found = experts(x, ids, weights)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_rows_at_all_leave_every_gradient_zero(family: str):
    experts = experts_of(family, torch.float32)
    experts.config._experts_implementation = "toolkit"
    y = experts(torch.randn(0, 16, requires_grad=True), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    y.sum().backward()
    assert y.shape == (0, 16)
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())
