"""The toolkit's experts implementation equals transformers' loop over experts."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from benchmarks.support.families import EXPERTS, FAMILIES, model_of
from benchmarks.support.processes import run_distributed
from toolkit.experts.layer.feed_forward import GroupedFeedForward
from toolkit.experts.sharding.layout import slots_of_rows
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.transformers import experts_modules, use_toolkit_kernel
from toolkit.integrations.transformers.compat import register_experts_function
from toolkit.integrations.transformers.kernel import experts_forward, feed_forward

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}
ROWS, IDS, WEIGHTS = torch.linspace(-1, 1, 128).sin().view(8, 16), torch.tensor([[0, 1]] * 8), torch.full((8, 2), 0.5)


def experts_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the last layer's experts, with the toolkit's implementation."""
    use_toolkit_kernel()
    experts = list(experts_modules(model_of(family, dtype=dtype)).values())[-1]
    experts.config._experts_implementation = "toolkit"
    return experts


def run(experts: Any, implementation: str, x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    experts.config._experts_implementation = implementation
    weights = weights.clone().requires_grad_()
    return [*run_rows(experts, lambda x: experts(x, ids, weights), x), weights.grad]


def run_rows(experts: Any, compute: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and the experts."""
    x = x.clone().requires_grad_()
    experts.zero_grad()
    y = compute(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in experts.parameters())]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for value, other in zip(found, expected, strict=True):
        assert other.norm() > 0
        assert (value - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_toolkit_kernel_equals_eager_experts(family: str, dtype: torch.dtype):
    experts, draws = experts_of(family, dtype), torch.Generator().manual_seed(1)
    x = torch.randn(21, 16, dtype=dtype, generator=draws)
    ids = torch.stack(
        [torch.randperm(EXPERTS - 1, generator=draws)[:2] for _ in range(21)]
    )  # the last expert gets no tokens
    weights = torch.rand(21, 2, dtype=dtype, generator=draws)
    assert_close(run(experts, "toolkit", x, ids, weights), run(experts, "eager", x, ids, weights), TOLERANCE[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_toolkit_kernel_with_rows_in_order_of_slots_equals_eager_experts(family: str):
    experts, counts = experts_of(family), torch.tensor([3, 0, 4, 1, 2, 0, 5, 1])
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    expected = run(experts, "eager", x, slots_of_rows(counts, 16), torch.ones(16, 1))
    assert_close(run_rows(experts, lambda rows: feed_forward(experts, rows, counts), x), expected[:-1], 1e-6)


def steps_of_sharded_experts() -> tuple[list[list[Tensor]], list[Tensor], list[int]]:
    """Return results of sharded experts by kernel, this rank's part of those of all experts, and rows by call."""
    kernel = Mock(side_effect=experts_forward)
    register_experts_function("other", kernel)
    whole, model = experts_of("mixtral"), model_of("mixtral")
    shard_experts(model)
    experts = list(experts_modules(model).values())[-1]
    y, x, *gradients, weights = run(whole, "eager", ROWS, IDS, WEIGHTS)
    rows = list(experts.expert_stack.placement.slots[experts.expert_stack.groups.ep_rank])
    found = [run(experts, name, ROWS, IDS, WEIGHTS) for name in ("toolkit", "other")]
    expected = [y, x, *(each[rows] for each in gradients), weights]
    return found, expected, [len(call.args[1]) for call in kernel.call_args_list]


def test_sharded_experts_with_any_kernel_equal_eager_experts():
    for rank, (found, expected, calls) in enumerate(run_distributed(steps_of_sharded_experts, 2)):
        torch.testing.assert_close(found, [expected] * 2, rtol=1e-5, atol=1e-6)
        assert calls == [(32, 1)[rank]]  # one row, for the gradients of a rank without tokens


@pytest.mark.parametrize(("family", "fused"), [("mixtral", True), ("gpt_oss", False)])
def test_toolkit_kernel_fuses_experts_without_biases(family: str, fused: bool, monkeypatch: pytest.MonkeyPatch):
    calls = []
    apply = GroupedFeedForward.apply
    monkeypatch.setattr(GroupedFeedForward, "apply", lambda *args: calls.append(1) or apply(*args))
    experts_of(family)(ROWS, IDS, WEIGHTS)
    assert bool(calls) is fused


@pytest.mark.parametrize("family", FAMILIES)
def test_toolkit_kernel_under_autocast_computes_in_bfloat16(family: str):
    experts = experts_of(family)
    expected = run(experts, "eager", ROWS, IDS, WEIGHTS)[0]
    experts.config._experts_implementation = "toolkit"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = experts(ROWS, IDS, WEIGHTS)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_toolkit_kernel_without_rows_has_zero_gradients(family: str):
    experts = experts_of(family)
    y = experts(ROWS[:0].clone().requires_grad_(), IDS[:0], WEIGHTS[:0])
    y.sum().backward()
    assert y.shape == (0, 16)
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())
