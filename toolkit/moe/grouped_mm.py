"""Grouped matrix products: one per expert, in one call."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad


def cast_as_autocast_would(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands in autocast's dtype while it is enabled, since autocast does not cast those of `grouped_mm`."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def grouped_mm(
    x_ND: Float[Tensor, "N D"], weight_SDF: Float[Tensor, "S D F"], rows_per_slot: Int[Tensor, " S"]
) -> Float[Tensor, "N F"]:
    """(N, F): each slot's rows of `x_ND`, in slot order, times that slot's matrix.

    Uses `grouped_product` for float32, bfloat16 and float16. It wants rows of a multiple of 16 bytes: others, such as
    those of adapters of rank 2, get columns of zeros. For other types slots are padded to a common length for
    `torch.bmm`, with a host sync.
    """
    x_ND, weight_SDF = cast_as_autocast_would(x_ND, weight_SDF)
    if not _accepts_type(x_ND, weight_SDF):
        return _padded_mm(x_ND, weight_SDF, rows_per_slot)
    dim, width = (-size % _multiple(x_ND) for size in weight_SDF.shape[1:])
    if dim or width:
        columns = weight_SDF.shape[2]
        x_ND, weight_SDF = pad(x_ND, (0, dim)), pad(weight_SDF, (0, width, 0, dim))
        return grouped_mm(x_ND, weight_SDF, rows_per_slot)[:, :columns]
    product = grouped_product(x_ND, weight_SDF, rows_per_slot.cumsum(0, dtype=torch.int32))
    return _ContiguousGradient.apply(product)


def grouped_product(left: Tensor, right: Tensor, ends_S: Int[Tensor, " S"]) -> Tensor:
    """`torch.nn.functional.grouped_mm`: (N, D) and (S, D, F) give (N, F), the rows of each slot times its matrix;
    (D, N) and (N, F) give (S, D, F), for each slot the product of its columns and its rows. `ends_S`: int32, where the
    rows of each slot end.

    A model that is compiled with `torch.compile` has it as an operator of its own in float32 and float16, because the
    meta function of torch's accepts bfloat16 only, and a layer would be several graphs.
    """
    if torch.compiler.is_compiling() and left.dtype != torch.bfloat16:
        return _compiled_product(left, right, ends_S)
    return torch.nn.functional.grouped_mm(left, right, offs=ends_S)


# With its schema, because torch cannot read annotations that are strings of a function that a type checker has wrapped.
@torch.library.custom_op(
    "toolkit::grouped_product", mutates_args=(), schema="(Tensor left, Tensor right, Tensor ends_S) -> Tensor"
)
def _compiled_product(left: Tensor, right: Tensor, ends_S: Tensor) -> Tensor:
    return torch.nn.functional.grouped_mm(left, right, offs=ends_S)


@_compiled_product.register_fake
def _product_of_shape(left: Tensor, right: Tensor, ends_S: Tensor) -> Tensor:
    if right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(ends_S.shape[0], left.shape[0], right.shape[1])


def _save_product(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Of rows and matrices: `GroupedFeedForward` has a backward of its own for the other case."""
    x_ND, weight_SDF, ends_S = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    grad_x = _compiled_product(grad_NF, weight_SDF.transpose(1, 2), ends_S) if needs_x else None
    grad_weight = _compiled_product(x_ND.t(), grad_NF, ends_S) if needs_weight else None
    return grad_x, grad_weight, None


_compiled_product.register_autograd(_product_backward, setup_context=_save_product)


class _ContiguousGradient(torch.autograd.Function):
    """The identity. The backward of `grouped_mm` refuses expanded gradients, such as that of `.sum()`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return grads[0].contiguous()


def accepts(x_ND: Float[Tensor, "N D"], weights: Float[Tensor, "S _ _"]) -> bool:
    """Whether `torch.nn.functional.grouped_mm` accepts these operands, whichever way the matrices lie."""
    return _accepts_type(x_ND, weights) and all(size % _multiple(x_ND) == 0 for size in weights.shape[1:])


def _accepts_type(x_ND: Tensor, weights: Tensor) -> bool:
    return x_ND.dtype in (torch.float32, torch.bfloat16, torch.float16) and x_ND.dtype == weights.dtype


def _multiple(rows: Tensor) -> int:
    """Elements in 16 bytes."""
    return 16 // rows.element_size()


def _padded_mm(
    x_ND: Float[Tensor, "N D"], weight_SDF: Float[Tensor, "S D F"], rows_per_slot: Int[Tensor, " S"]
) -> Tensor:
    slots = len(rows_per_slot)
    place_N, longest = padded_places(rows_per_slot, len(x_ND))
    padded = x_ND.new_zeros(slots * longest, x_ND.shape[1]).index_copy(0, place_N, x_ND)
    product = torch.bmm(padded.view(slots, longest, x_ND.shape[1]), weight_SDF)
    return product.view(slots * longest, weight_SDF.shape[2]).index_select(0, place_N)


def padded_places(rows_per_slot: Int[Tensor, " S"], num_rows: int) -> tuple[Int[Tensor, " N"], int]:
    """(N): where each of `num_rows` rows in slot order is, once every slot is filled up to as many rows as the longest
    has; and that number, for which the host waits for the device."""
    slots = len(rows_per_slot)
    longest = int(rows_per_slot.max()) if slots else 0
    here = rows_per_slot.device
    slot_N = torch.arange(slots, device=here).repeat_interleave(rows_per_slot, output_size=num_rows)
    first_S = rows_per_slot.cumsum(0) - rows_per_slot
    return slot_N * longest + torch.arange(num_rows, device=here) - first_S[slot_N], longest
