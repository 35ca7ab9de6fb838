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

    `ends_S`: int32, the end of each slot's rows in `x_ND`. With `recompute`, no tensor of width F or H is saved for the
    backward, which repeats the product with `up_SHD`: seven grouped products instead of six. With `later`, the weights
    are those that `TakeLater` returned.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        up_SHD: Tensor,
        down_SFD: Tensor,
        ends_S: Tensor,
        recompute: bool = False,
        later: LaterGradients | None = None,
    ) -> Tensor:
        ctx.later = later
        hidden = _hidden(x_ND, up_SHD, down_SFD, ends_S)
        ctx.save_for_backward(x_ND, up_SHD, down_SFD, ends_S, *(() if recompute else hidden))
        return grouped_product(hidden[-1], down_SFD, ends_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, up_SHD, down_SFD, ends_S, *hidden = ctx.saved_tensors
        up_NH, activated_NF, hidden_NF = hidden or _hidden(x_ND, up_SHD, down_SFD, ends_S)
        grad_ND = grads[0].contiguous()  # `grouped_product` does not support expanded gradients, as from `.sum()`
        needs_x, needs_up, needs_down = ctx.needs_input_grad[:3]

        def of_down() -> Tensor | None:
            return grouped_product(hidden_NF.t(), grad_ND, ends_S) if needs_down else None

        def of_up() -> Tensor | None:
            return grouped_product(grad_NH.t(), x_ND, ends_S) if needs_up else None

        grad_down = of_down() if ctx.later is None else None
        grad_NF = grouped_product(grad_ND, down_SFD.transpose(1, 2), ends_S)
        grad_NH = _activate_backward(grad_NF, up_NH, activated_NF)
        grad_x = grouped_product(grad_NH, up_SHD, ends_S) if needs_x else None
        if ctx.later is None:
            return grad_x, of_up(), grad_down, None, None, None
        ctx.later.compute = lambda: (of_up(), of_down())
        return grad_x, None, None, None, None, None


def _hidden(x_ND: Tensor, up_SHD: Tensor, down_SFD: Tensor, ends_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output of the up projection, its activation, and the input of the down projection."""
    up_NH = grouped_product(x_ND, up_SHD.transpose(1, 2), ends_S)
    return up_NH, *_activate(up_NH, down_SFD.shape[1])


def _activate(up_NH: Tensor, hidden_dim: int) -> tuple[Tensor, Tensor]:
    """The activation and the input of the down projection, which for ReLU are the same tensor."""
    if up_NH.shape[1] == hidden_dim:
        up_NH.relu_()
        return up_NH, up_NH
    activated_NF = silu(up_NH[:, :hidden_dim])
    return activated_NF, activated_NF * up_NH[:, hidden_dim:]


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
