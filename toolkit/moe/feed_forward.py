"""All feed-forward experts of a rank as one autograd node over grouped matrix products.

Left to autograd, the same products pass a dozen times over their intermediate results. One node passes over them half
as often: it writes both halves of a gradient where they belong, and works in place on what nobody needs any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu


class GroupedFeedForward(torch.autograd.Function):
    """`down(relu(up(x)))`, or `down(silu(gate(x)) * up(x))` where `up_SHD` has two rows for each of `down_SFD`.

    `ends_S` (int32) says where each slot's rows of `x_ND` end. With `recompute`, nothing of width F or H is kept for
    the backward, which multiplies with `up_SHD` once more: a seventh grouped product beside six.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, up_SHD: Tensor, down_SFD: Tensor, ends_S: Tensor, recompute: bool = False
    ) -> Tensor:
        hidden = _hidden(x_ND, up_SHD, down_SFD, ends_S)
        ctx.save_for_backward(x_ND, up_SHD, down_SFD, ends_S, *(() if recompute else hidden))
        return grouped_mm(hidden[-1], down_SFD, offs=ends_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, up_SHD, down_SFD, ends_S, *hidden = ctx.saved_tensors
        up_NH, activated_NF, hidden_NF = hidden or _hidden(x_ND, up_SHD, down_SFD, ends_S)
        grad_ND = grads[0].contiguous()  # grouped products refuse an expanded one, such as a bare `.sum()` gives
        grad_NF = grouped_mm(grad_ND, down_SFD.transpose(1, 2), offs=ends_S)
        grad_NH = _activate_backward(grad_NF, up_NH, activated_NF)
        grad_x = grouped_mm(grad_NH, up_SHD, offs=ends_S) if ctx.needs_input_grad[0] else None
        grad_up = grouped_mm(grad_NH.t(), x_ND, offs=ends_S)
        grad_down = grouped_mm(hidden_NF.t(), grad_ND, offs=ends_S)
        return grad_x, grad_up, grad_down, None, None


def _hidden(x_ND: Tensor, up_SHD: Tensor, down_SFD: Tensor, ends_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the up projection gives, its activation, and what the down projection is given."""
    up_NH = grouped_mm(x_ND, up_SHD.transpose(1, 2), offs=ends_S)
    return up_NH, *_activate(up_NH, down_SFD.shape[1])


def _activate(up_NH: Tensor, hidden_dim: int) -> tuple[Tensor, Tensor]:
    """The activation, and what the down projection is given: for ReLU the same."""
    if up_NH.shape[1] == hidden_dim:
        up_NH.relu_()
        return up_NH, up_NH
    activated_NF = silu(up_NH[:, :hidden_dim])
    return activated_NF, activated_NF * up_NH[:, hidden_dim:]


def _activate_backward(grad_NF: Tensor, up_NH: Tensor, activated_NF: Tensor) -> Tensor:
    """The gradient of the up projection's result; overwrites `grad_NF`."""
    hidden_dim = grad_NF.shape[1]
    if up_NH.shape[1] == hidden_dim:
        return torch.ops.aten.threshold_backward(grad_NF, up_NH, 0)
    gate, linear = up_NH[:, :hidden_dim], up_NH[:, hidden_dim:]
    grad_NH = torch.empty_like(up_NH)
    torch.mul(grad_NF, activated_NF, out=grad_NH[:, hidden_dim:])
    torch.ops.aten.silu_backward.grad_input(grad_NF.mul_(linear), gate, grad_input=grad_NH[:, :hidden_dim])
    return grad_NH
