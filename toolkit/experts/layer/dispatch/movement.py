"""Rows copied and summed, with backwards that sum and copy."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.experts.compat import embedding_bag_weights_grad
from toolkit.experts.layer.dispatch.order import Copies, SlotOrder


def sum_rows(
    rows: Tensor, place_N: Int[Tensor, " N"], first_T: Int[Tensor, " T"], weights_N: Float[Tensor, " N"] | None = None
) -> Tensor:
    """For each token the (weighted) sum of the rows at its places, from its first on, in one pass over them."""
    if not len(rows):  # no tokens, or all assignments were dropped
        return rows.new_zeros(len(first_T), rows.shape[1])
    # What `nn.functional.embedding_bag` calls after some checks, which take as long as the sum for few tokens.
    return torch.embedding_bag(rows.detach(), place_N, first_T, False, 0, False, weights_N)[0]


def dot_rows(grad_TD: Float[Tensor, "T D"], rows_ND: Float[Tensor, "N D"], token_N: Int[Tensor, " N"]) -> Tensor:
    """(N): the dot product of each row with the gradient of its token, without gathering gradients.

    The gradient of `embedding_bag` by its weights. Autograd computes it only along with that by the table.
    """
    row_N = torch.arange(len(token_N), device=token_N.device)
    return embedding_bag_weights_grad(grad_TD, rows_ND, row_N, row_N, token_N)


class Copy(torch.autograd.Function):
    """Copies of token rows. The backward sums by gathering, in place of scattered adds."""

    @staticmethod
    def forward(ctx: Any, x_TD: Float[Tensor, "T D"], copies: Copies) -> Tensor:
        ctx.save_for_backward(copies.place_N, copies.first_T)
        return x_TD.index_select(0, copies.token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return sum_rows(grads[0].contiguous(), *ctx.saved_tensors), None


class Sum(torch.autograd.Function):
    """The transpose of `Copy`: the sum of the copies of each token."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Float[Tensor, "N D"], copies: Copies) -> Tensor:
        ctx.save_for_backward(copies.token_N)
        return sum_rows(rows_ND, copies.place_N, copies.first_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token_N,) = ctx.saved_tensors
        return grads[0].index_select(0, token_N), None


class WeightedSum(torch.autograd.Function):
    """For each token the sum of its rows, weighted as `weights_TK` says of its assignments."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Float[Tensor, "N D"], weights_TK: Float[Tensor, "T K"], order: SlotOrder) -> Tensor:
        ctx.save_for_backward(rows_ND, weights_TK, order.assignment_N, order.token_N)
        weights_N = weights_TK.flatten()
        if order.kept_N is not None:
            weights_N = weights_N.index_select(0, order.kept_N)
        return sum_rows(rows_ND, order.place_N, order.first_T, weights_N.to(rows_ND.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weights_TK, assignment_N, token_N = ctx.saved_tensors
        grad_weights = torch.zeros_like(weights_TK, memory_format=torch.contiguous_format)
        if not len(rows_ND):
            return rows_ND, grad_weights, None
        grad_TD = grads[0].contiguous()
        weights_N = weights_TK.flatten().index_select(0, assignment_N)
        if rows_ND.dtype == weights_TK.dtype:
            row_N = torch.arange(len(token_N), device=token_N.device)
            grad_ND = sum_rows(grad_TD, token_N, row_N, weights_N)
            grad_weights_N = dot_rows(grad_TD, rows_ND, token_N)
        else:  # half precision: sum in the precision of the weights
            grad_ND = grad_TD.index_select(0, token_N)
            grad_weights_N = (grad_ND * rows_ND).sum(dim=1, dtype=weights_TK.dtype)
            grad_ND = grad_ND.mul_(weights_N.unsqueeze(1))
        grad_weights.view(-1).index_copy_(0, assignment_N, grad_weights_N)
        return grad_ND, grad_weights, None
