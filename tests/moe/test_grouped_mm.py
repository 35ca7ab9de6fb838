"""The grouped product against one product per slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit.moe.grouped_mm import grouped_mm

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


@pytest.mark.parametrize("width", [5, 16], ids=["padded", "grouped"])
def test_it_takes_the_expanded_gradient_of_a_bare_sum(width: int) -> None:
    x_ND, weight_SDF, rows_per_slot = operands([3, 0, 5, 1], 8, width, torch.float32)
    grouped_mm(x_ND, weight_SDF, rows_per_slot).sum().backward()
    expected = one_by_one(x_ND, weight_SDF, rows_per_slot).sum()
    torch.testing.assert_close((x_ND.grad, weight_SDF.grad), torch.autograd.grad(expected, (x_ND, weight_SDF)))


def test_an_empty_slot_gets_a_gradient_of_zeros() -> None:
    x_ND, weight_SDF, rows_per_slot = operands([3, 0, 5, 1], 8, 16, torch.float32)
    grouped_mm(x_ND, weight_SDF, rows_per_slot).sum().backward()
    assert weight_SDF.grad is not None
    assert torch.equal(weight_SDF.grad[1], torch.zeros(8, 16))


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


def test_gradients_pass_a_numerical_check() -> None:
    x_ND, weight_SDF, rows_per_slot = operands([3, 0, 2], 3, 4, torch.float64)
    assert torch.autograd.gradcheck(lambda x, weight: grouped_mm(x, weight, rows_per_slot), (x_ND, weight_SDF))
