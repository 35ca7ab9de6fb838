"""The experts against a plain network for each: as one autograd node, and step by step for odd types and widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.helpers import run_distributed
from toolkit.experts.layer.grouped_experts import Activation, GroupedExperts
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel import collectives
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement

COUNTS = {"ragged": [3, 0, 5, 1], "one expert takes all": [0, 9, 0, 0], "no rows": [0, 0, 0, 0]}
both_paths = pytest.mark.parametrize("stepwise", [False, True], ids=["as called", "step by step"])
both_activations = pytest.mark.parametrize("activation", ["relu", "swiglu"])


def make_experts(activation: Activation, dim: int = 8, hidden_dim: int = 12, slots: int = 4) -> GroupedExperts:
    return GroupedExperts(dim, hidden_dim, expert_ids=range(slots), activation=activation)


def compute(experts: GroupedExperts, x_ND: Tensor, rows_per_slot: Tensor, stepwise: bool) -> Tensor:
    if stepwise:
        return experts.step_by_step(x_ND, experts.up, experts.down, rows_per_slot)
    return experts(x_ND, rows_per_slot)


def one_by_one(experts: GroupedExperts, x_ND: Tensor, rows_per_slot: Tensor) -> Tensor:
    """Each expert by itself, as one would write it in a paper."""
    results = []
    for x, up, down in zip(x_ND.split(rows_per_slot.tolist()), experts.up, experts.down, strict=True):
        hidden = x @ up.T
        if experts.activation == "swiglu":
            gate, linear = hidden.chunk(2, dim=-1)
            hidden = silu(gate) * linear
        else:
            hidden = hidden.relu()
        results.append(hidden @ down)
    return torch.cat(results)


@both_paths
@both_activations
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("dim", "hidden_dim"), [(8, 12), (7, 5)], ids=["aligned", "odd sizes"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_experts_are_one_network_per_slot_in_values_and_gradients(
    counts: list[int],
    dim: int,
    hidden_dim: int,
    activation: Activation,
    dtype: torch.dtype,
    tolerance: float,
    stepwise: bool,
) -> None:
    experts = make_experts(activation, dim, hidden_dim).to(dtype)
    x_ND = torch.randn(sum(counts), dim, dtype=dtype, requires_grad=True)
    grad_ND = torch.randn(sum(counts), dim, dtype=dtype)
    leaves = (x_ND, experts.up, experts.down)
    rows_per_slot = torch.tensor(counts)
    actual, expected = compute(experts, x_ND, rows_per_slot, stepwise), one_by_one(experts, x_ND, rows_per_slot)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    ours, theirs = (torch.autograd.grad(y_ND, leaves, grad_ND) for y_ND in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@both_activations
def test_an_empty_expert_gets_a_gradient_of_zeros_whatever_lay_in_memory(activation: Activation) -> None:
    experts = make_experts(activation)
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        experts(torch.randn(4, 8), torch.tensor([4, 0, 0, 0])).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for parameter in (experts.up, experts.down):
        assert parameter.grad is not None
        assert parameter.grad[0].any()
        assert not parameter.grad[1:].any()


@both_paths
@both_activations
def test_the_expanded_gradient_of_a_bare_sum_is_taken(activation: Activation, stepwise: bool) -> None:
    experts = make_experts(activation)
    x_ND, rows_per_slot = torch.randn(9, 8, requires_grad=True), torch.tensor([3, 0, 5, 1])
    leaves = (x_ND, experts.up, experts.down)
    ours = torch.autograd.grad(compute(experts, x_ND, rows_per_slot, stepwise).sum(), leaves)
    theirs = torch.autograd.grad(one_by_one(experts, x_ND, rows_per_slot).sum(), leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@both_paths
@both_activations
def test_under_autocast_experts_compute_in_bfloat16_and_keep_float32_gradients(
    activation: Activation, stepwise: bool
) -> None:
    experts = make_experts(activation)
    x_ND, rows_per_slot = torch.randn(9, 8, requires_grad=True), torch.tensor([3, 0, 5, 1])
    leaves = (x_ND, experts.up, experts.down)
    with torch.autocast("cpu", torch.bfloat16):
        actual = compute(experts, x_ND, rows_per_slot, stepwise)
        # Rounded as ours: a hidden unit next to the bend of ReLU is on the same side of it.
        expected = one_by_one(experts, x_ND, rows_per_slot)
    exact = one_by_one(experts, x_ND, rows_per_slot)
    assert actual.dtype == torch.bfloat16
    ours, theirs = (torch.autograd.grad(y_ND.float().sum(), leaves) for y_ND in (actual, expected))
    assert [grad.dtype for grad in ours] == [torch.float32] * 3
    # bfloat16 has 8 bits of precision: about 1 % after two products.
    for one, other in [(actual.float(), exact), *zip(ours, theirs, strict=True)]:
        assert (one - other).norm() <= 0.03 * other.norm()


def test_initial_weights_depend_on_the_expert_and_not_on_its_placement() -> None:
    all_of_them = GroupedExperts(4, 6, expert_ids=[0, 1, 2, 3], seed=7)
    some = GroupedExperts(4, 6, expert_ids=[3, 1], seed=7)
    assert torch.equal(some.up, all_of_them.up[[3, 1]])
    assert torch.equal(some.down, all_of_them.down[[3, 1]])
    assert not torch.equal(some.up, GroupedExperts(4, 6, expert_ids=[3, 1], seed=8).up)
    assert not torch.equal(some.up[0], some.up[1])


def second_derivatives_refused(activation: Activation) -> list[bool]:
    """Of the experts' gradients by themselves, and where the router is trained, too."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    layer = make_moe(8, 16, 4, 2, activation=activation, groups=make_expert_groups(world))
    head = nn.Linear(8, 3)
    refused = []
    for router_is_trained in (False, True):
        layer.router.requires_grad_(router_is_trained)
        loss = head(layer(torch.randn(12, 8))).square().sum()
        gradients = torch.autograd.grad(loss, [layer.experts.up, layer.experts.down, head.weight], create_graph=True)
        for gradient in gradients[:2]:
            with pytest.raises(RuntimeError, match="once_differentiable"):
                gradient.square().sum().backward(retain_graph=True)
            refused.append(gradient.requires_grad)
    return refused


@pytest.mark.parametrize("world", [1, 2])
@both_activations
def test_second_derivatives_are_refused_and_not_wrong(activation: Activation, world: int) -> None:
    assert run_distributed(second_derivatives_refused, world, activation) == [[True] * 4] * world


# torch.compile itself makes an instance of each autograd function that it traces, and asks tensors for their gradient.


class GeneratorsStayOnTheirDevice(TorchDispatchMode):
    """Raises, as CUDA does, when a tensor of another device is drawn with a generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        assert generator is None or generator.device == args[0].device, f"{func} on {args[0].device}"
        return func(*args, **(kwargs or {}))


def test_make_moe_with_default_device_draws_weights_on_the_cpu() -> None:
    with GeneratorsStayOnTheirDevice(), torch.device("meta"):
        layer = make_moe(8, 4, 4, 2)
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}


class Scaling(nn.Module):
    """One number per expert and unit."""

    def __init__(self, dim: int, hidden_dim: int, *, expert_ids: Sequence[int], **_: Any) -> None:  # noqa: ARG002
        super().__init__()
        ids = torch.tensor(expert_ids, dtype=torch.get_default_dtype())
        self.scale_SD = nn.Parameter((1 + ids)[:, None].repeat(1, dim))

    def forward(self, x_ND: Tensor, rows_per_slot: Tensor) -> Tensor:
        return x_ND * self.scale_SD.repeat_interleave(rows_per_slot, dim=0)


def step_of_own_experts() -> tuple[Tensor, Tensor, list[int]]:
    world, rank = collectives.world_size(), collectives.rank()
    torch.manual_seed(0)
    layer = make_moe(4, 8, 4, 2, groups=make_expert_groups(world), expert_type=Scaling).double()
    x_TD = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double().chunk(world)[rank]
    y_TD = layer(x_TD)
    y_TD.square().sum().backward()
    migrate(layer.expert_stack, ExpertPlacement(layer.placement.slots[::-1]), None)
    torch.testing.assert_close(layer(x_TD), y_TD)
    return y_TD.detach(), world * layer.experts.scale_SD.detach(), list(layer.placement.slots[rank])


def test_make_moe_with_own_experts_shards_and_moves_them():
    ((expected, _, _),) = run_distributed(step_of_own_experts, 1)
    ranks = run_distributed(step_of_own_experts, 2)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), expected)
    for _, scale_SD, held in ranks:
        assert scale_SD[:, 0].tolist() == [2 * (1 + expert) for expert in held]
