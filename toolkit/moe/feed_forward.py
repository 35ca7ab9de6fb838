"""All feed-forward experts of a rank as one autograd node over grouped matrix products.

Left to autograd, the same products keep four intermediate tensors and pass over them a dozen times. One node keeps the
up projection's result, computes the cheap elementwise part again, and writes both halves of its gradient in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu


class GroupedFeedForward(torch.autograd.Function):
    """`down(relu(up(x)))`, or `down(silu(gate(x)) * up(x))` where `up_SHD` has two rows for each of `down_SFD`.

    `ends_S` (int32) says where each slot's rows of `x_ND` end.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, up_SHD: Tensor, down_SFD: Tensor, ends_S: Tensor) -> Tensor:
        up_NH = grouped_mm(x_ND, up_SHD.transpose(1, 2), offs=ends_S)
        y_ND = grouped_mm(_activate(up_NH, down_SFD.shape[1]), down_SFD, offs=ends_S)
        ctx.save_for_backward(x_ND, up_NH, up_SHD, down_SFD, ends_S)
        return y_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, up_NH, up_SHD, down_SFD, ends_S = ctx.saved_tensors
        grad_ND = grads[0].contiguous()  # grouped products refuse an expanded one, such as a bare `.sum()` gives
        grad_NF = grouped_mm(grad_ND, down_SFD.transpose(1, 2), offs=ends_S)
        grad_NH, hidden_NF = _activate_backward(grad_NF, up_NH)
        grad_x = grouped_mm(grad_NH, up_SHD, offs=ends_S) if ctx.needs_input_grad[0] else None
        grad_up = grouped_mm(grad_NH.t(), x_ND, offs=ends_S)
        grad_down = grouped_mm(hidden_NF.t(), grad_ND, offs=ends_S)
        return grad_x, grad_up, grad_down, None


def _activate(up_NH: Tensor, hidden_dim: int) -> Tensor:
    if up_NH.shape[1] == hidden_dim:
        return up_NH.relu_()
    return silu(up_NH[:, :hidden_dim]).mul_(up_NH[:, hidden_dim:])


def _activate_backward(grad_NF: Tensor, up_NH: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the up projection's result, and once more what the down projection was given."""
    hidden_dim = grad_NF.shape[1]
    if up_NH.shape[1] == hidden_dim:
        return torch.ops.aten.threshold_backward(grad_NF, up_NH, 0), up_NH
    gate, linear = up_NH[:, :hidden_dim], up_NH[:, hidden_dim:]
    activated = silu(gate)
    grad_NH = torch.empty_like(up_NH)
    torch.mul(grad_NF, activated, out=grad_NH[:, hidden_dim:])
    torch.ops.aten.silu_backward.grad_input(grad_NF.mul_(linear), gate, grad_input=grad_NH[:, :hidden_dim])
    return grad_NH, activated.mul_(linear)
