"""Legendre Memory Units: learned weights write into a Legendre memory and read it.

`LMU` is the nonlinear unit, which has to go step by step; `ParallelLMU` writes without looking back, so that all its
steps are computed at once. Letters as in `speech.legendre`, and H hidden units.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speech.legendre import Form, LegendreMemory, delay_system

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


class LMU(nn.Module):
    """The nonlinear unit: input, hidden units and memory write one signal u (Voelker et al. 2019, eq. 6 and 7).

        u_t = e_x x_t + e_h h_{t-1} + e_m m_{t-1}
        m_t = A m_{t-1} + B u_t
        h_t = tanh(W_x x_t + W_h h_{t-1} + W_m m_t)

    `forward` maps (B, T, input_size) to the hidden units after each step (B, T, H), and returns the state (h, m) too.

    With `remembers_input` e_x starts at 1 and e_h, e_m, W_x and W_h at 0, so that the memory holds the input itself and
    is all that the hidden units read, as in the authors' network for permuted sequential MNIST; else at random.
    """

    constant_buffers = ("A", "B")

    A: Tensor
    B: Tensor

    def __init__(self, input_size: int, hidden_size: int, order: int, theta: float, *, remembers_input: bool = False):
        super().__init__()
        self.e_x = nn.Parameter(_lecun_uniform(input_size))
        self.e_h = nn.Parameter(_lecun_uniform(hidden_size))
        self.e_m = nn.Parameter(torch.zeros(order))
        self.W_x = nn.Parameter(nn.init.xavier_normal_(torch.empty(hidden_size, input_size)))
        self.W_h = nn.Parameter(nn.init.xavier_normal_(torch.empty(hidden_size, hidden_size)))
        self.W_m = nn.Parameter(nn.init.xavier_normal_(torch.empty(hidden_size, order)))
        if remembers_input:
            nn.init.ones_(self.e_x)
            for weight in (self.e_h, self.W_x, self.W_h):
                nn.init.zeros_(weight)
        a, b = delay_system(order, theta)
        self.register_buffer("A", a.float(), persistent=False)
        self.register_buffer("B", b.float(), persistent=False)

    def forward(
        self, x: Float[Tensor, "B T I"], state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Float[Tensor, "B T H"], tuple[Float[Tensor, "B H"], Float[Tensor, "B D"]]]:
        with torch.autocast(x.device.type, enabled=False):
            x = x.transpose(0, 1).to(self.W_x.dtype)  # (T, B, input_size)
            if state is None:
                zeros = x.new_zeros(x.shape[1], len(self.e_h) + len(self.e_m))
                state = (zeros[:, : len(self.e_h)], zeros[:, len(self.e_h) :])
            written = x @ self.e_x
            driven = x @ self.W_x.T
            h, m = _Recurrence.apply(written, driven, *state, self.e_h, self.e_m, self.W_h, self.W_m, self.A, self.B)
            return h.transpose(0, 1), (h[-1], m[-1])

    def last(self, x: Float[Tensor, "B T I"]) -> Float[Tensor, "B H"]:
        """(B, H) after the last step only."""
        return self(x)[1][0]


class _Recurrence(torch.autograd.Function):
    """The loop of `LMU`, time first, with its backward written out.

    A weight gradient is then one product over all steps instead of a sum of T small ones: half the time of autograd on
    the same loop.
    """

    @staticmethod
    def forward(ctx: Any, written: Tensor, driven: Tensor, h_0: Tensor, m_0: Tensor, *weights: Tensor) -> Any:
        """written (T, B), driven (T, B, H), h_0 (B, H), m_0 (B, D) -> h (T, B, H), m (T, B, D)."""
        e_h, e_m, w_h, w_m, a, b = weights
        h = torch.empty_like(driven)
        m = driven.new_empty(*written.shape, len(b))
        previous_h, previous_m = h_0, m_0
        for t in range(len(written)):
            u = torch.addmv(torch.addmv(written[t], previous_h, e_h), previous_m, e_m)
            torch.addmm(u[:, None] * b, previous_m, a.T, out=m[t])
            torch.addmm(torch.addmm(driven[t], previous_h, w_h.T), m[t], w_m.T, out=h[t])
            previous_h = h[t].tanh_()
            previous_m = m[t]
        ctx.save_for_backward(h, m, h_0, m_0, *weights)
        return h, m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grad_h, grad_m = gradients
        h, m, h_0, m_0, e_h, e_m, w_h, w_m, a, b = ctx.saved_tensors
        grad_driven = torch.empty_like(h)
        grad_written = h.new_empty(h.shape[:2])
        carried_h = torch.zeros_like(h_0)
        carried_m = torch.zeros_like(m_0)
        slope = 1 - h * h
        for t in reversed(range(len(h))):
            grad_activation = torch.mul(carried_h + grad_h[t], slope[t], out=grad_driven[t])
            grad_memory = torch.addmm(carried_m + grad_m[t], grad_activation, w_m)
            grad_u = torch.mv(grad_memory, b, out=grad_written[t])[:, None]
            carried_h = torch.addmm(grad_u * e_h, grad_activation, w_h)
            carried_m = torch.addmm(grad_u * e_m, grad_memory, a)
        before_h = torch.cat([h_0[None], h[:-1]]).flatten(0, 1)
        before_m = torch.cat([m_0[None], m[:-1]]).flatten(0, 1)
        flat_activation = grad_driven.flatten(0, 1)
        flat_u = grad_written.flatten()
        return (
            grad_written,
            grad_driven,
            carried_h,
            carried_m,
            flat_u @ before_h,
            flat_u @ before_m,
            flat_activation.T @ before_h,
            flat_activation.T @ m.flatten(0, 1),
            None,
            None,
        )


def _lecun_uniform(fan_in: int) -> Tensor:
    bound = math.sqrt(3 / fan_in)
    return torch.empty(fan_in).uniform_(-bound, bound)


class ParallelLMU(nn.Module):
    """Writes C signals that depend only on the input, and reads all memories at once.

    Chilkuri and Eliasmith 2021, section 3:

        u_t = W_u x_t + b_u
        m_t = A m_{t-1} + B u_t, for each of the C signals
        h_t = ReLU(W_m m_t + W_x x_t + b_h)

    `forward` maps (B, T, input_size) to (B, T, H), and returns the memory's state, as `LegendreMemory` does.
    """

    def __init__(
        self, input_size: int, hidden_size: int, order: int, theta: float, *, channels: int = 1, form: Form = "chunks"
    ):
        super().__init__()
        self.write = nn.Linear(input_size, channels)
        self.memory = LegendreMemory(order, theta, form=form)
        self.read = nn.Linear(channels * order, hidden_size)
        self.skip = nn.Linear(input_size, hidden_size, bias=False)

    def forward(
        self, x: Float[Tensor, "B T I"], state: Float[Tensor, "B C D"] | None = None
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B C D"]]:
        memory, state = self.memory(self.write(x), state)
        return (self.read(memory.flatten(2)) + self.skip(x)).relu(), state

    def last(self, x: Float[Tensor, "B T I"]) -> Float[Tensor, "B H"]:
        """(B, H) after the last step only."""
        return (self.read(self.memory.last(self.write(x)).flatten(1)) + self.skip(x[:, -1])).relu()


class SequenceClassifier(nn.Module):
    """Images (B, 28, 28) as sequences of pixels in a fixed random order, to logits (B, num_classes).

    `unit` has `last`: a sequence (B, T, 1) to hidden units (B, H) after its last step.
    """

    order: Tensor

    def __init__(
        self,
        pixels: nn.Module,
        unit: LMU | ParallelLMU,
        *,
        order: Tensor,
        hidden_size: int,
        num_classes: int,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.pixels, self.unit = pixels, unit
        self.register_buffer("order", order)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, images: Shaped[Tensor, "B ..."]) -> Float[Tensor, "B K"]:
        sequence = self.pixels(images)[:, self.order, None]
        return self.head(self.dropout(self.unit.last(sequence)))
