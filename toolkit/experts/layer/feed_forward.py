"""All feed-forward experts of a rank as one autograd function over grouped matrix products.

It reads and writes intermediate results half as often as the same products under autograd: both halves of a gradient
are written into one tensor, and tensors that are no longer needed are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from toolkit.experts.layer.grouped_mm import grouped_product
from toolkit.experts.layer.rows import SlotOrder, sum_of_copies, sum_rows


class LaterGradients:
    """Weight gradients that a `GroupedFeedForward` defers to `TakeLater`."""

    def __init__(self) -> None:
        self.compute: Callable[[], tuple[Tensor | None, Tensor | None]] | None = None
        """Computes the gradients of both weights; None before the backward pass, or if nothing was deferred."""


class TakeLater(torch.autograd.Function):
    """Identity on the weights `up` and `down`, for a `GroupedFeedForward` with the same `later`.

    Its backward pass computes their gradients. Autograd runs the newest node first, so the backward pass of a node
    created between this node and the feed-forward runs between the row gradients and the weight gradients.
    """

    @staticmethod
    def forward(ctx: Any, up_SHD: Tensor, down_SFD: Tensor, later: LaterGradients) -> tuple[Tensor, Tensor]:
        ctx.later = later
        ctx.set_materialize_grads(False)
        return up_SHD.view_as(up_SHD), down_SFD.view_as(down_SFD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        compute, ctx.later.compute = ctx.later.compute, None
        if compute is None:
            return (*grads, None)
        if torch.is_grad_enabled():  # `create_graph`: double backward must raise, as it does for the rows
            marker = torch.ones((), requires_grad=True)  # the gradients are None, with which nothing would raise
            return (*once_differentiable(lambda *_: compute())(ctx, marker), None)
        return (*compute(), None)


class GroupedFeedForward(torch.autograd.Function):
    """`down(relu(up(x)))`; or, if H = 2F, SwiGLU: `down(silu(gate(x)) * up(x))` with gate and up stacked in `up_SHD`.

    `ends_S`: int32, the end of each slot's rows. The backward pass computes the activation again. With `recompute`, no
    tensor of width F or H is saved for it, and it repeats the product with `up_SHD`: seven grouped products instead of
    six. With `later`, the weights are those that `TakeLater` returned.

    With `weights_RK`, `order` and `ranks` of `Pairs`, `x` are rows (R, D) and the result is the weighted sum of their
    pairs, as between `permute` and `unpermute`. Hidden activations are multiplied by routing weights, so that neither
    copies of rows nor outputs of pairs are saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_SHD: Tensor,
        down_SFD: Tensor,
        ends_S: Tensor,
        recompute: bool = False,
        later: LaterGradients | None = None,
        weights_RK: Tensor | None = None,
        order: SlotOrder | None = None,
        ranks: int = 1,
    ) -> Tensor:
        ctx.later, ctx.ranks = later, ranks
        of_pairs = (None,) * 4 if order is None else (order.source, order.pair, order.place, order.first)
        source, pair, place, first = of_pairs
        up_NH = _up(_permuted(x, source), up_SHD, down_SFD, ends_S)
        ctx.save_for_backward(x, up_SHD, down_SFD, ends_S, None if recompute else up_NH, weights_RK, *of_pairs)
        hidden_NF = _hidden(up_NH, _activated(up_NH, down_SFD))
        weights_N1 = _weights_of_pairs(weights_RK, pair, x)
        if weights_N1 is not None:
            hidden_NF = _scaled(hidden_NF, up_NH, weights_N1)
        y_ND = grouped_product(hidden_NF, down_SFD, ends_S)
        return y_ND if place is None or first is None else sum_rows(y_ND, place, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, up_SHD, down_SFD, ends_S, up_NH, weights_RK, source, pair, place, first = ctx.saved_tensors
        up_NH = _up(_permuted(x, source), up_SHD, down_SFD, ends_S) if up_NH is None else up_NH
        activated_NF = _activated(up_NH, down_SFD)
        scale_N1 = _weights_of_pairs(weights_RK, pair, x, ctx.ranks)
        # `grouped_product` does not support expanded gradients, as from `.sum()`.
        grad_ND = _permuted(grads[0].contiguous(), source)
        needs_x, needs_up, needs_down = ctx.needs_input_grad[:3]
        grad_weights = grad_down = None
        hidden_NF = _hidden(up_NH, activated_NF)

        def of_down() -> Tensor | None:
            return grouped_product(hidden_NF.t(), grad_ND, ends_S) if needs_down else None

        def of_up() -> Tensor | None:
            return grouped_product(grad_NH.t(), _permuted(x, source), ends_S) if needs_up else None

        grad_NF = grouped_product(grad_ND, down_SFD.transpose(1, 2), ends_S)
        if scale_N1 is not None:
            grad_N = (grad_NF * hidden_NF).sum(1, dtype=weights_RK.dtype)
            grad_weights = torch.zeros_like(weights_RK, memory_format=torch.contiguous_format)
            grad_weights.view(-1).index_copy_(0, pair, grad_N)
            hidden_NF = _scaled(hidden_NF, up_NH, scale_N1)
            grad_NF.mul_(scale_N1)
        if ctx.later is None:
            grad_down = of_down()
            hidden_NF = grad_ND = ends_S  # frees both; torch.compile does not trace `del` of names in closures
        grad_NH = _activate_backward(grad_NF, up_NH, activated_NF)
        del grad_NF, activated_NF
        grad_x = grouped_product(grad_NH, up_SHD, ends_S) if needs_x else None
        if grad_x is not None and place is not None:
            grad_x = sum_of_copies(grad_x, place, first, ctx.ranks)
        if ctx.later is None:
            return grad_x, of_up(), grad_down, None, None, None, grad_weights, None, None
        ctx.later.compute = lambda: (of_up(), of_down())
        return grad_x, None, None, None, None, None, grad_weights, None, None


def _permuted(rows: Tensor, source: Tensor | None) -> Tensor:
    return rows if source is None else rows.index_select(0, source)


def _weights_of_pairs(weights_RK: Tensor | None, pair: Tensor | None, like: Tensor, ranks: int = 1) -> Tensor | None:
    """The routing weight of each pair divided by `ranks`, shape (N, 1)."""
    if weights_RK is None or pair is None:
        return None
    return (weights_RK.flatten().index_select(0, pair) / ranks).to(like.dtype).unsqueeze(1)


def _up(x_ND: Tensor, up_SHD: Tensor, down_SFD: Tensor, ends_S: Tensor) -> Tensor:
    """The output of the up projection, rectified for ReLU."""
    up_NH = grouped_product(x_ND, up_SHD.transpose(1, 2), ends_S)
    return up_NH.relu_() if up_NH.shape[1] == down_SFD.shape[1] else up_NH


def _activated(up_NH: Tensor, down_SFD: Tensor) -> Tensor:
    """The activation, which for ReLU is `up_NH`."""
    hidden_dim = down_SFD.shape[1]
    return up_NH if up_NH.shape[1] == hidden_dim else silu(up_NH[:, :hidden_dim])


def _hidden(up_NH: Tensor, activated_NF: Tensor) -> Tensor:
    """The input of the down projection without routing weights, which for ReLU is `up_NH`."""
    return up_NH if activated_NF is up_NH else activated_NF * up_NH[:, activated_NF.shape[1] :]


def _scaled(hidden_NF: Tensor, up_NH: Tensor, scale_N1: Tensor) -> Tensor:
    """`hidden_NF` times `scale_N1`, in place unless it is `up_NH`, which is saved."""
    return up_NH * scale_N1 if hidden_NF is up_NH else hidden_NF.mul_(scale_N1)


def _activate_backward(grad_NF: Tensor, up_NH: Tensor, activated_NF: Tensor) -> Tensor:
    """The gradient by the output of the up projection; overwrites `grad_NF`."""
    hidden_dim = grad_NF.shape[1]
    if up_NH.shape[1] == hidden_dim:
        return torch.ops.aten.threshold_backward(grad_NF, up_NH, 0)
    gate = up_NH[:, :hidden_dim]
    linear = up_NH[:, hidden_dim:]
    if torch.compiler.is_compiling():  # which writes into slices by itself, and follows no `out` that is one
        grad_gate = torch.ops.aten.silu_backward(grad_NF * linear, gate)
        return torch.cat([grad_gate, grad_NF * activated_NF], dim=1)
    grad_NH = torch.empty_like(up_NH)
    torch.mul(grad_NF, activated_NF, out=grad_NH[:, hidden_dim:])
    torch.ops.aten.silu_backward.grad_input(grad_NF.mul_(linear), gate, grad_input=grad_NH[:, :hidden_dim])
    return grad_NH
