"""The grouped product against one product per slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit.experts.layer import grouped_mm as grouped_mm_module
from toolkit.experts.layer.grouped_experts import Activation, GroupedExperts
from toolkit.experts.layer.grouped_mm import ZeroEmptySlots, grouped_mm

COUNTS = {"ragged": [3, 0, 5, 1], "one slot takes all": [0, 9, 0, 0], "no rows": [0, 0, 0, 0]}


def one_by_one(x_ND: Tensor, weight_SDF: Tensor, rows_per_slot: Tensor) -> Tensor:
    parts = x_ND.split(rows_per_slot.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weight_SDF.unbind(), strict=True)])


def operands(counts: list[int], dim: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(sum(counts), dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), dim, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x_ND, weight, torch.tensor(counts)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("dim", "width"), [(8, 16), (7, 16), (8, 5)], ids=["aligned", "odd dim", "odd width"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_it_is_one_product_per_slot_in_values_and_gradients(
    counts: list[int], dim: int, width: int, dtype: torch.dtype, tolerance: float
) -> None:
    x_ND, weight_SDF, rows_per_slot = operands(counts, dim, width, dtype)
    actual, expected = grouped_mm(x_ND, weight_SDF, rows_per_slot), one_by_one(x_ND, weight_SDF, rows_per_slot)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = torch.autograd.grad(actual, (x_ND, weight_SDF), grad)
    theirs = torch.autograd.grad(expected, (x_ND, weight_SDF), grad)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("width", [5, 16], ids=["padded", "grouped"])
def test_it_takes_the_expanded_gradient_of_a_bare_sum(width: int, counts: list[int]) -> None:
    x_ND, weight_SDF, rows_per_slot = operands(counts, 8, width, torch.float32)
    grouped_mm(x_ND, weight_SDF, rows_per_slot).sum().backward()
    expected = one_by_one(x_ND, weight_SDF, rows_per_slot).sum()
    torch.testing.assert_close((x_ND.grad, weight_SDF.grad), torch.autograd.grad(expected, (x_ND, weight_SDF)))


@pytest.mark.parametrize("counts", [[], [0, 0, 0]], ids=["no slots", "no rows"])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_experts_take_no_rows_and_have_any_number_of_slots(counts: list[int], activation: Activation) -> None:
    experts = GroupedExperts(8, 16, expert_ids=range(len(counts)), activation=activation)
    x_ND = torch.zeros(0, 8, requires_grad=True)
    experts(x_ND, torch.tensor(counts, dtype=torch.int64)).sum().backward()
    for tensor in (x_ND, experts.up, experts.down):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def garbage_in_empty_slots(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm` as GPUs with the fault compute it."""
    product = grouped_mm_of_torch(left, right, offs=offs)
    if right.ndim == 2:
        product[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
    return product


grouped_mm_of_torch = torch.nn.functional.grouped_mm


def test_gradients_of_empty_slots_are_zeros_where_torch_leaves_them_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm_module, "leaves_empty_slots_unset", lambda _: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", garbage_in_empty_slots)
    experts = GroupedExperts(8, 16, expert_ids=range(4))
    experts(torch.randn(9, 8), torch.tensor([3, 0, 5, 1])).square().sum().backward()
    for weight in experts.parameters():
        assert [gradient.abs().sum().item() > 0 for gradient in weight.grad] == [True, False, True, True]
        assert weight.grad.isfinite().all()

    x_ND, weight_SDF, rows_per_slot = operands([3, 0, 5, 1], 8, 16, torch.float32)
    product = grouped_mm(x_ND, weight_SDF, rows_per_slot)
    # torch's own backward of it, which computes in C++, is as on this processor.
    torch.testing.assert_close(product, one_by_one(x_ND, weight_SDF, rows_per_slot))
    gradient = torch.full((4, 8, 16), torch.nan)
    gradient[[0, 2, 3]] = 1.0
    ends = rows_per_slot.cumsum(0, dtype=torch.int32)
    (found,) = torch.autograd.grad(ZeroEmptySlots.apply(weight_SDF, ends), weight_SDF, gradient)
    assert found.sum((1, 2)).tolist() == [128.0, 0.0, 128.0, 128.0]


@pytest.mark.parametrize("width", [5, 16], ids=["padded", "grouped"])
def test_under_autocast_it_computes_in_the_type_of_a_plain_product(width: int) -> None:
    x_ND, weight_SDF, rows_per_slot = operands([3, 0, 5, 1], 8, width, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = grouped_mm(x_ND, weight_SDF, rows_per_slot), one_by_one(x_ND, weight_SDF, rows_per_slot)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)
    actual.float().square().sum().backward()
    assert weight_SDF.grad is not None
    assert weight_SDF.grad.dtype == torch.float32
