"""Rows gathered for assignments, summed for tokens and permuted, with backwards that gather too."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.compat import embedding_bag_weights_grad
from toolkit.experts.layer.dispatch.order import SlotOrder


def sum_rows(rows: Tensor, places_TK: Int[Tensor, "T K"], weights_TK: Float[Tensor, "T K"] | None = None) -> Tensor:
    """For each token the (weighted) sum of the rows at its K places, in one pass over them."""
    if not len(rows):  # no tokens, or all assignments were dropped
        return rows.new_zeros(len(places_TK), rows.shape[1])
    first_T = torch.arange(0, places_TK.numel(), places_TK.shape[1], device=places_TK.device)
    weights_N = None if weights_TK is None else weights_TK.flatten()
    # What `nn.functional.embedding_bag` calls after some checks, which take as long as the sum for few tokens.
    return torch.embedding_bag(rows.detach(), places_TK.flatten(), first_T, False, 0, False, weights_N)[0]


def dot_rows(grad_TD: Float[Tensor, "T D"], rows_ND: Float[Tensor, "N D"], token_N: Int[Tensor, " N"]) -> Tensor:
    """(N): the dot product of each row with the gradient of its token, without gathering gradients.

    The gradient of `embedding_bag` by its weights. Autograd computes it only along with that by the table.
    """
    row_N = torch.arange(len(token_N), device=token_N.device)
    return embedding_bag_weights_grad(grad_TD, rows_ND, row_N, row_N, token_N)


class Spread(torch.autograd.Function):
    """Gather the token row of each assignment, in slot order. The backward gathers too, in place of scattered adds."""

    @staticmethod
    def forward(ctx: Any, x_TD: Float[Tensor, "T D"], order: SlotOrder) -> Tensor:
        ctx.save_for_backward(order.place_TK, order.kept_TK)
        return x_TD.index_select(0, order.token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        place_TK, kept_TK = ctx.saved_tensors
        grad_ND = grads[0].contiguous()
        return sum_rows(grad_ND, place_TK, None if kept_TK is None else kept_TK.to(grad_ND.dtype)), None


class Sum(torch.autograd.Function):
    """The transpose of `Spread`: the sum of each token's rows, of an order that has dropped ones."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Float[Tensor, "N D"], order: SlotOrder) -> Tensor:
        ctx.save_for_backward(order.token_N)
        assert order.kept_TK is not None
        return sum_rows(rows_ND, order.place_TK, order.kept_TK.to(rows_ND.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token_N,) = ctx.saved_tensors
        return grads[0].index_select(0, token_N), None


class WeightedSum(torch.autograd.Function):
    """The inverse of `Spread`: the sum of each token's K rows, weighted."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Float[Tensor, "N D"], weights_TK: Float[Tensor, "T K"], order: SlotOrder) -> Tensor:
        ctx.save_for_backward(rows_ND, weights_TK, order.assignment_N, order.token_N, order.place_TK, order.kept_TK)
        if order.kept_TK is not None:
            weights_TK = weights_TK * order.kept_TK
        return sum_rows(rows_ND, order.place_TK, weights_TK.to(rows_ND.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weights_TK, assignment_N, token_N, place_TK, kept_TK = ctx.saved_tensors
        grad_TD = grads[0].contiguous()
        weights_N = weights_TK.flatten().index_select(0, assignment_N)
        if not len(rows_ND):
            return rows_ND, torch.zeros_like(weights_TK), None
        if rows_ND.dtype == weights_TK.dtype:
            grad_ND = sum_rows(grad_TD, token_N.unsqueeze(1), weights_N.unsqueeze(1))
            grad_weights_N = dot_rows(grad_TD, rows_ND, token_N)
        else:  # half precision: sum in the precision of the weights
            grad_ND = grad_TD.index_select(0, token_N)
            grad_weights_N = (grad_ND * rows_ND).sum(dim=1, dtype=weights_TK.dtype)
            grad_ND = grad_ND.mul_(weights_N.unsqueeze(1))
        grad_weights_TK = grad_weights_N.index_select(0, place_TK.flatten()).view(place_TK.shape)
        return grad_ND, grad_weights_TK if kept_TK is None else grad_weights_TK * kept_TK, None


class Permute(torch.autograd.Function):
    """Permute rows; the backward permutes by `inverse`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None
