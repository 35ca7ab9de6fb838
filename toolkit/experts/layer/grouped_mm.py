"""Grouped matrix products: one per expert, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def cast_as_autocast_would(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the operands to autocast's dtype if enabled, because autocast does not cover `grouped_mm`."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def grouped_mm(
    x_ND: Float[Tensor, "N D"], weight_SDF: Float[Tensor, "S D F"], rows_per_slot: Int[Tensor, " S"]
) -> Float[Tensor, "N F"]:
    """Multiply each slot's rows of `x_ND`, in slot order, by the slot's matrix: (N, F).

    Uses `grouped_product` for float32, bfloat16 and float16. Rows must be a multiple of 16 bytes, so shorter rows, such
    as for adapters of rank 2, are padded with zeros. For other dtypes, slots are padded to a common length for
    `torch.bmm`, with a host sync.
    """
    x_ND, weight_SDF = cast_as_autocast_would(x_ND, weight_SDF)
    if not _accepts_type(x_ND, weight_SDF):
        return in_equal_batches(lambda batches: torch.bmm(batches, weight_SDF), x_ND, rows_per_slot)
    dim, width = (-size % _multiple(x_ND) for size in weight_SDF.shape[1:])
    if dim or width:
        columns = weight_SDF.shape[2]
        x_ND, weight_SDF = pad(x_ND, (0, dim)), pad(weight_SDF, (0, width, 0, dim))
        return grouped_mm(x_ND, weight_SDF, rows_per_slot)[:, :columns]
    ends_S = rows_per_slot.cumsum(0, dtype=torch.int32)
    if leaves_empty_slots_unset(weight_SDF.device):
        weight_SDF = ZeroEmptySlots.apply(weight_SDF, ends_S)
    return _ContiguousGradient.apply(_product(x_ND, weight_SDF, ends_S))


def grouped_product(left: Tensor, right: Tensor, ends_S: Int[Tensor, " S"]) -> Tensor:
    """Multiply (N, D) and (S, D, F) to (N, F), the rows of each slot times its matrix; or (D, N) and (N, F) to
    (S, D, F), the columns of each slot times its rows. `ends_S`: int32, the end of each slot's rows.

    `torch.nn.functional.grouped_mm` for autograd functions: without a gradient, and for any number of slots and rows,
    including zero, which torch's GPU kernels do not fully support.
    """
    if not (left.numel() and len(ends_S)):
        return left.new_zeros(_shape_of_product(left, right, ends_S))
    product = _product(left, right, ends_S)
    if right.ndim == 2 and leaves_empty_slots_unset(left.device):
        product.masked_fill_(_is_empty(ends_S, 3), 0)
    return product


@torch.compiler.assume_constant_result
def leaves_empty_slots_unset(device: torch.device) -> bool:
    """Whether torch's kernel for this GPU leaves the products of slots without rows uninitialized. The kernels for
    data-center Blackwell (compute capability 10) may: pytorch issue 172439."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def _is_empty(ends_S: Int[Tensor, " S"], dimensions: int) -> Tensor:
    """Return whether a slot has no rows, shape (S, 1, ...) of so many dimensions."""
    return (ends_S.diff(prepend=ends_S.new_zeros(1)) == 0).view(-1, *[1] * (dimensions - 1))


class ZeroEmptySlots(torch.autograd.Function):
    """The weights (S, ...) as they are; their gradient is 0 for slots without rows, whatever it was."""

    @staticmethod
    def forward(ctx: Any, weight_SDF: Tensor, ends_S: Tensor) -> Tensor:
        ctx.save_for_backward(ends_S)
        return weight_SDF.view_as(weight_SDF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ends_S,) = ctx.saved_tensors
        return grads[0].masked_fill(_is_empty(ends_S, grads[0].ndim), 0), None


def _product(left: Tensor, right: Tensor, ends_S: Int[Tensor, " S"]) -> Tensor:
    """`torch.nn.functional.grouped_mm`.

    A model that is compiled with `torch.compile` has it as an operator of its own in float32 and float16, because the
    meta function of torch's accepts bfloat16 only, and a layer would be several graphs.
    """
    if torch.compiler.is_compiling() and left.dtype != torch.bfloat16:
        return _compiled_product(left, right, ends_S)
    return torch.nn.functional.grouped_mm(left, right, offs=ends_S)


# With its schema, because torch cannot read annotations that are strings of a function that a type checker has wrapped.
# Not part of a CUDA graph, because for these dtypes the host reads the end of each slot's rows.
@torch.library.custom_op(
    "toolkit::grouped_product",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor ends_S) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _compiled_product(left: Tensor, right: Tensor, ends_S: Tensor) -> Tensor:
    return torch.nn.functional.grouped_mm(left, right, offs=ends_S)


@_compiled_product.register_fake
def _fake_product(left: Tensor, right: Tensor, ends_S: Tensor) -> Tensor:
    return left.new_empty(_shape_of_product(left, right, ends_S))


def _shape_of_product(left: Tensor, right: Tensor, ends_S: Tensor) -> tuple[int, ...]:
    if right.ndim == 3:
        return left.shape[0], right.shape[2]
    return ends_S.shape[0], left.shape[0], right.shape[1]


def _save_product(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Is the backward for rows and matrices: `GroupedFeedForward` has a backward of its own for the other case."""
    x_ND, weight_SDF, ends_S = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    grad_x = _compiled_product(grad_NF, weight_SDF.transpose(1, 2), ends_S) if needs_x else None
    grad_weight = _compiled_product(x_ND.t(), grad_NF, ends_S) if needs_weight else None
    return grad_x, grad_weight, None


_compiled_product.register_autograd(_product_backward, setup_context=_save_product)


class _ContiguousGradient(torch.autograd.Function):
    """Identity with contiguous gradients. The backward pass of `grouped_mm` does not support expanded gradients, as
    from `.sum()`, even without rows, for which `contiguous` has no effect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        grad = grads[0]
        return grad.contiguous() if grad.numel() else torch.zeros_like(grad, memory_format=torch.contiguous_format)


def accepts(x_ND: Float[Tensor, "N D"], weights: Float[Tensor, "S _ _"]) -> bool:
    """Whether `torch.nn.functional.grouped_mm` accepts these operands, whichever way the matrices lie."""
    return _accepts_type(x_ND, weights) and all(size % _multiple(x_ND) == 0 for size in weights.shape[1:])


def _accepts_type(x_ND: Tensor, weights: Tensor) -> bool:
    return x_ND.dtype in (torch.float32, torch.bfloat16, torch.float16) and x_ND.dtype == weights.dtype


def _multiple(rows: Tensor) -> int:
    """Elements in 16 bytes."""
    return 16 // rows.element_size()


def in_equal_batches(
    compute: Callable[[Float[Tensor, "S rows D"]], Tensor],
    rows_ND: Float[Tensor, "N D"],
    rows_per_slot: Int[Tensor, " S"],
) -> Float[Tensor, "N F"]:
    """Return the outputs of `compute` on equal batches, one per slot. A host sync: batches are padded to the longest.

    Args:
        compute: Called with the rows of each slot, padded with copies of a row, whose outputs are dropped: experts that
            normalize rows would turn zeros into NaN.
        rows_ND: Rows in slot order, shape (N, D).
        rows_per_slot: Rows of each slot, int64, shape (S,).
    """
    slots, here = len(rows_per_slot), rows_per_slot.device
    longest = int(rows_per_slot.max()) if slots else 0
    first_S = rows_per_slot.cumsum(0) - rows_per_slot
    slot_N = torch.arange(slots, device=here).repeat_interleave(rows_per_slot, output_size=len(rows_ND))
    place_N = slot_N * longest + torch.arange(len(rows_ND), device=here) - first_S[slot_N]
    row_of_place = first_S.clamp(max=len(rows_ND) - 1).repeat_interleave(longest)
    filled = rows_ND.detach().index_select(0, row_of_place).index_copy(0, place_N, rows_ND)
    outputs = compute(filled.view(slots, longest, rows_ND.shape[1]))
    return outputs.reshape(-1, outputs.shape[-1]).index_select(0, place_N)
