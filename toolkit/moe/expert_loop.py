"""All experts of a CPU in one autograd node: expert by expert, while their rows are in the cache.

A CPU has no grouped kernel: torch's `grouped_mm` is itself a loop there. Doing the loop here keeps the elementwise work
beside the products, writes straight into the results, copies nothing, and takes every type and every size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ExpertLoop(torch.autograd.Function):
    """`down(relu(up(x)))`, or `down(silu(gate(x)) * up(x))` where `up_SHD` has twice the rows of `down_SFD`."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, up_SHD: Tensor, down_SFD: Tensor, rows_per_slot: list[int]) -> Tensor:
        hidden_dim, dim = down_SFD.shape[1:]
        up_NH = x_ND.new_empty(len(x_ND), up_SHD.shape[1])
        y_ND = x_ND.new_empty(len(x_ND), dim)
        rows = (tensor.split(rows_per_slot) for tensor in (x_ND, up_NH, y_ND))
        for x, up, y, up_weight, down_weight in zip(*rows, up_SHD.unbind(), down_SFD.unbind(), strict=True):
            if len(x):
                torch.mm(x, up_weight.t(), out=up)
                torch.mm(_activate(up, hidden_dim), down_weight, out=y)
        ctx.save_for_backward(x_ND, up_NH, up_SHD, down_SFD)
        ctx.rows_per_slot = rows_per_slot
        return y_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, up_NH, up_SHD, down_SFD = ctx.saved_tensors
        grad_ND = grads[0].contiguous()
        hidden_dim = down_SFD.shape[1]
        grad_x = torch.empty_like(x_ND)
        grad_up_weight, grad_down_weight = torch.empty_like(up_SHD), torch.empty_like(down_SFD)
        rows = (tensor.split(ctx.rows_per_slot) for tensor in (x_ND, up_NH, grad_ND, grad_x))
        weights = (weight.unbind() for weight in (up_SHD, down_SFD, grad_up_weight, grad_down_weight))
        for x, up, grad, to_x, up_weight, down_weight, to_up, to_down in zip(*rows, *weights, strict=True):
            if not len(x):
                to_up.zero_()
                to_down.zero_()
                continue
            grad_up, hidden = _activate_backward(torch.mm(grad, down_weight.t()), up, hidden_dim)
            torch.mm(hidden.t(), grad, out=to_down)
            torch.mm(grad_up.t(), x, out=to_up)
            torch.mm(grad_up, up_weight, out=to_x)
        return grad_x, grad_up_weight, grad_down_weight, None


def _activate(up: Tensor, hidden_dim: int) -> Tensor:
    if up.shape[1] == hidden_dim:
        return up.relu_()
    return torch.nn.functional.silu(up[:, :hidden_dim]).mul_(up[:, hidden_dim:])


def _activate_backward(grad_hidden: Tensor, up: Tensor, hidden_dim: int) -> tuple[Tensor, Tensor]:
    """The gradient of the up projection's result, and once more what the down projection was given."""
    if up.shape[1] == hidden_dim:
        return torch.ops.aten.threshold_backward(grad_hidden, up, 0), up
    gate, linear = up[:, :hidden_dim], up[:, hidden_dim:]
    activated = torch.nn.functional.silu(gate)
    grad_up = torch.empty_like(up)
    torch.mul(grad_hidden, activated, out=grad_up[:, hidden_dim:])
    torch.ops.aten.silu_backward.grad_input(grad_hidden.mul_(linear), gate, grad_input=grad_up[:, :hidden_dim])
    return grad_up, activated.mul_(linear)
