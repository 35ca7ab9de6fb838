"""Experts, fused and step by step, compared with one network per slot."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.processes import run_distributed
from toolkit.experts.layer import grouped_mm as grouped_mm_module
from toolkit.experts.layer.grouped_experts import Activation, GroupedExperts
from toolkit.experts.layer.grouped_mm import ZeroEmptySlots
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel import collectives
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement

COUNTS = {"ragged": [3, 0, 5, 1], "one slot": [0, 9, 0, 0], "no rows": [0, 0, 0, 0], "no slots": []}
both_paths = pytest.mark.parametrize("stepwise", [False, True], ids=["fused", "stepwise"])
both_activations = pytest.mark.parametrize("activation", ["relu", "swiglu"])


def garbage_in_empty_slots(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` as on the GPUs of pytorch issue 172439."""
    product = grouped_mm_of_torch(left, right, offs=offs)
    if right.ndim == 2:
        product[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
    return product


grouped_mm_of_torch = torch.nn.functional.grouped_mm


def test_gradients_of_empty_slots_are_zero_if_torch_leaves_them_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm_module, "leaves_empty_slots_unset", lambda _: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", garbage_in_empty_slots)
    experts = GroupedExperts(8, 16, expert_ids=range(4))
    experts(torch.randn(9, 8), torch.tensor([3, 0, 5, 1])).square().sum().backward()
    for weight in experts.parameters():
        assert [gradient.abs().sum().item() > 0 for gradient in weight.grad] == [True, False, True, True]
        assert weight.grad.isfinite().all()

    x_ND, rows_per_slot = torch.randn(9, 8), torch.tensor([3, 0, 5, 1])
    torch.testing.assert_close(compute(experts, x_ND, rows_per_slot, True), reference(experts, x_ND, rows_per_slot))
    weight_SDF, gradient = torch.randn(4, 8, 16, requires_grad=True), torch.full((4, 8, 16), torch.nan)
    gradient[[0, 2, 3]] = 1.0
    ends = rows_per_slot.cumsum(0, dtype=torch.int32)
    (found,) = torch.autograd.grad(ZeroEmptySlots.apply(weight_SDF, ends), weight_SDF, gradient)
    assert found.sum((1, 2)).tolist() == [128.0, 0.0, 128.0, 128.0]


def make_experts(activation: Activation, dim: int = 8, hidden_dim: int = 12, slots: int = 4) -> GroupedExperts:
    return GroupedExperts(dim, hidden_dim, expert_ids=range(slots), activation=activation)


def compute(experts: GroupedExperts, x_ND: Tensor, rows_per_slot: Tensor, stepwise: bool) -> Tensor:
    if stepwise:
        return experts.step_by_step(x_ND, experts.up, experts.down, rows_per_slot)
    return experts(x_ND, rows_per_slot)


def reference(experts: GroupedExperts, x_ND: Tensor, rows_per_slot: Tensor) -> Tensor:
    """Return the outputs of one plain network per slot."""
    results = [x_ND[:0]]
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
@pytest.mark.parametrize(("dim", "hidden_dim"), [(8, 12), (7, 5), (7, 16), (8, 5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_experts_equal_one_network_per_slot(counts, dim, hidden_dim, activation, dtype, tolerance, stepwise):
    experts = make_experts(activation, dim, hidden_dim, len(counts)).to(dtype)
    x_ND = torch.randn(sum(counts), dim, dtype=dtype, requires_grad=True)
    grad_ND = torch.randn(sum(counts), dim, dtype=dtype)
    leaves = (x_ND, experts.up, experts.down)
    rows_per_slot = torch.tensor(counts, dtype=torch.int64)
    actual, expected = compute(experts, x_ND, rows_per_slot, stepwise), reference(experts, x_ND, rows_per_slot)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(actual, leaves, grad_ND)
    expected_grads = torch.autograd.grad(expected, leaves, grad_ND, materialize_grads=True)
    torch.testing.assert_close(grads, expected_grads, rtol=tolerance, atol=tolerance)


@both_activations
def test_slots_without_rows_get_zero_gradients_in_uninitialized_memory(activation: Activation) -> None:
    experts = make_experts(activation)
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        experts(torch.randn(4, 8), torch.tensor([4, 0, 0, 0])).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for parameter in (experts.up, experts.down):
        assert parameter.grad[0].any()
        assert not parameter.grad[1:].any()


@both_paths
@both_activations
def test_experts_under_autocast_and_with_expanded_gradients(activation: Activation, stepwise: bool) -> None:
    experts = make_experts(activation)
    x_ND, rows_per_slot = torch.randn(9, 8, requires_grad=True), torch.tensor([3, 0, 5, 1])
    leaves = (x_ND, experts.up, experts.down)
    with torch.autocast("cpu", torch.bfloat16):
        actual = compute(experts, x_ND, rows_per_slot, stepwise)
        # With equal rounding, a hidden unit near the kink of ReLU is on the same side.
        expected = reference(experts, x_ND, rows_per_slot)
    exact = reference(experts, x_ND, rows_per_slot)
    assert actual.dtype == torch.bfloat16
    grads, expected_grads = (torch.autograd.grad(y_ND.float().sum(), leaves) for y_ND in (actual, expected))
    assert [grad.dtype for grad in grads] == [torch.float32] * 3
    # bfloat16 has 8 bits of precision: about 1 % after two products.
    for found, wanted in [(actual.float(), exact), *zip(grads, expected_grads, strict=True)]:
        assert (found - wanted).norm() <= 0.03 * wanted.norm()
    grads = torch.autograd.grad(compute(experts, x_ND, rows_per_slot, stepwise).sum(), leaves)
    torch.testing.assert_close(grads, torch.autograd.grad(exact.sum(), leaves), rtol=1e-5, atol=1e-5)


def test_initial_weights_depend_on_the_expert_and_not_on_its_placement() -> None:
    full = GroupedExperts(4, 6, expert_ids=[0, 1, 2, 3], seed=7)
    some = GroupedExperts(4, 6, expert_ids=[3, 1], seed=7)
    assert torch.equal(some.up, full.up[[3, 1]])
    assert torch.equal(some.down, full.down[[3, 1]])
    assert not torch.equal(some.up, GroupedExperts(4, 6, expert_ids=[3, 1], seed=8).up)
    assert not torch.equal(some.up[0], some.up[1])


def double_backward_raises(activation: Activation) -> list[bool]:
    layer = make_moe(8, 16, 4, 2, activation=activation, groups=make_expert_groups(collectives.world_size()))
    head = nn.Linear(8, 3)
    found = []
    for router_is_trained in (False, True):
        layer.router.requires_grad_(router_is_trained)
        loss = head(layer(torch.randn(12, 8))).square().sum()
        gradients = torch.autograd.grad(loss, [layer.experts.up, layer.experts.down, head.weight], create_graph=True)
        for gradient in gradients[:2]:
            with pytest.raises(RuntimeError, match="once_differentiable"):
                gradient.square().sum().backward(retain_graph=True)
            found.append(gradient.requires_grad)
    return found


@pytest.mark.parametrize("world", [1, 2])
@both_activations
def test_double_backward_through_experts_raises(activation: Activation, world: int) -> None:
    assert run_distributed(double_backward_raises, world, activation) == [[True] * 4] * world


class CheckGeneratorDevices(TorchDispatchMode):
    """Raises, as CUDA does, for draws on a device other than the generator's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        assert generator is None or generator.device == args[0].device, f"{func} on {args[0].device}"
        return func(*args, **(kwargs or {}))


class Permuted(GroupedExperts):
    """Experts that get a copy of its row for each pair, because the layer does not know their forward."""

    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args)


def step_of_layers(options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return outputs and gradients of a layer that computes rows in one autograd function, and of one that does not."""
    found = []
    for expert_type in (GroupedExperts, Permuted):
        torch.manual_seed(0)
        layer = make_moe(8, 16, 4, 2, expert_type=expert_type, groups=make_expert_groups(), **options)
        x_TD = torch.randn(30, 8, generator=torch.Generator().manual_seed(collectives.rank())).requires_grad_()
        y_TD = layer(x_TD)
        (y_TD * torch.linspace(0, 1, 8)).sum().backward()
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append({"y": y_TD.detach(), "x": x_TD.grad, **grads})
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "options", [{"capacity_factor": 0.8}, {"activation": "swiglu"}, {"activation": "swiglu", "recompute": "selective"}]
)
def test_fused_permutation_equals_copies_and_weighted_sums(world: int, options: dict[str, Any]) -> None:
    for fused, permuted in run_distributed(step_of_layers, world, options):
        torch.testing.assert_close(fused, permuted, rtol=1e-5, atol=1e-6)


def test_make_moe_with_default_device_draws_weights_on_the_cpu() -> None:
    with CheckGeneratorDevices(), torch.device("meta"):
        layer = make_moe(8, 4, 4, 2)
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}


class Scaling(nn.Module):
    """Experts with one factor per unit."""

    def __init__(self, dim: int, hidden_dim: int, *, expert_ids: Sequence[int], **_: Any) -> None:  # noqa: ARG002
        super().__init__()
        ids = torch.tensor(expert_ids, dtype=torch.get_default_dtype())
        self.scale_SD = nn.Parameter((1 + ids)[:, None].repeat(1, dim))

    def forward(self, x_ND: Tensor, rows_per_slot: Tensor) -> Tensor:
        return x_ND * self.scale_SD.repeat_interleave(rows_per_slot, dim=0)


def custom_experts_step() -> tuple[Tensor, Tensor, list[int]]:
    world, rank = collectives.world_size(), collectives.rank()
    torch.manual_seed(0)
    layer = make_moe(4, 8, 4, 2, groups=make_expert_groups(world), expert_type=Scaling).double()
    x_TD = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double().chunk(world)[rank]
    y_TD = layer(x_TD)
    y_TD.square().sum().backward()
    migrate(layer.expert_stack, ExpertPlacement(layer.placement.slots[::-1]), None)
    torch.testing.assert_close(layer(x_TD), y_TD)
    return y_TD.detach(), world * layer.experts.scale_SD.detach(), list(layer.placement.slots[rank])


def test_make_moe_with_custom_experts_shards_and_migrates_them():
    ((expected, _, _),) = run_distributed(custom_experts_step, 1)
    ranks = run_distributed(custom_experts_step, 2)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), expected)
    for _, scale_SD, held in ranks:
        assert scale_SD[:, 0].tolist() == [2 * (1 + expert) for expert in held]
