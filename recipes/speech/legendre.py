"""Legendre memory: a fixed linear recurrence that represents a sliding window of a signal.

A memory of order D holds the last `theta` steps of a scalar signal u as D coefficients of shifted Legendre polynomials
(Voelker, Kajic and Eliasmith 2019, NeurIPS 32, eq. 1 and 2). It is linear and does not change with time, so all steps
can be computed at once (Chilkuri and Eliasmith 2021, ICML, section 3).

Letters: B batch, T steps, C signals that are remembered side by side, D order of the memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Float

Form = Literal["chunks", "fft", "steps"]
CHUNK = 32
"""Steps per chunk of the chunked form, which costs (CHUNK + D) * D per step and signal."""


def delay_system(order: int, theta: float) -> tuple[Float[Tensor, "D D"], Float[Tensor, " D"]]:
    """A (D, D) and B (D,) of m_t = A m_{t-1} + B u_t in float64, with zero-order hold and a time step of 1."""
    i = torch.arange(order, dtype=torch.float64)
    scale = (2 * i + 1) / theta
    sign = torch.where(i[:, None] < i, -1.0, (-1.0) ** (i[:, None] - i + 1))
    both = torch.zeros(order + 1, order + 1, dtype=torch.float64)
    both[:order, :order] = scale[:, None] * sign
    both[:order, order] = scale * (-1.0) ** i
    discrete = torch.linalg.matrix_exp(both)
    return discrete[:order, :order].contiguous(), discrete[:order, order].contiguous()


def impulse_response(a: Float[Tensor, "D D"], b: Float[Tensor, " D"], length: int) -> Float[Tensor, "T D"]:
    """(length, D): A^t B for t = 0, 1, ... Each product doubles the length."""
    response = b[None]
    power = a
    while len(response) < length:
        response, power = torch.cat([response, response @ power.T]), power @ power
    return response[:length]


class LegendreMemory(nn.Module):
    """The memory of each of C signals (B, T, C), as (B, T, C, D). Has no parameters, takes any length.

    Three forms of the same sums: `chunks` (matrix products, a state passed from chunk to chunk; best for small D),
    `fft` (a convolution with the impulse response; best for large D) and `steps` (one at a time, the specification).
    Raises UserError for another form.
    """

    constant_buffers = ("A", "B", "within", "over_a_chunk")
    """See `toolkit.integrations.accelerate.prepare`: 30 MB for an order of 468."""

    A: Tensor
    B: Tensor
    within: Tensor
    over_a_chunk: Tensor

    def __init__(self, order: int, theta: float, *, form: Form = "chunks"):
        super().__init__()
        self.order, self.form = order, form
        a, b = delay_system(order, theta)
        # Not persistent, because they follow from the arguments.
        self.register_buffer("A", a.float(), persistent=False)
        self.register_buffer("B", b.float(), persistent=False)
        response = impulse_response(a, b, CHUNK)
        toeplitz = torch.zeros(CHUNK, order, CHUNK, dtype=torch.float64)  # [t, :, s] = A^(t - s) B
        for t in range(CHUNK):
            toeplitz[t, :, : t + 1] = response[: t + 1].flip(0).T
        powers = [a]
        for _ in range(CHUNK - 1):
            powers.append(a @ powers[-1])
        within = torch.cat([toeplitz.flatten(0, 1), torch.cat(powers)], 1)  # (CHUNK * D, CHUNK + D)
        self.register_buffer("within", within.float(), persistent=False)
        self.register_buffer("over_a_chunk", powers[-1].float(), persistent=False)
        self._exact = (a, b)
        self._response = response.float()

    def forward(
        self, u: Float[Tensor, "B T C"], state: Float[Tensor, "B C D"] | None = None
    ) -> tuple[Float[Tensor, "B T C D"], Float[Tensor, "B C D"]]:
        """Return the memory after each step (B, T, C, D), and after the last (B, C, D): the next call's `state`."""
        with torch.autocast(u.device.type, enabled=False):  # half the digits would not carry a window of 1000 steps
            u = u.float()
            before = self.B.new_zeros(u.shape[0], u.shape[2], self.order) if state is None else state
            if u.shape[1] == 0:
                return u[..., None] * self.B, before
            if self.form == "chunks":
                memory = self._by_chunks(u, before)
            elif self.form == "steps":
                memory = self._by_steps(u, before)
            else:
                memory = self._by_fft(u)
                if state is not None:  # the state decays by A^(t+1), which has no cheap form
                    memory = memory + self._by_steps(torch.zeros_like(u), state)
        return memory, memory[:, -1]

    def last(self, u: Float[Tensor, "B T C"]) -> Float[Tensor, "B C D"]:
        """Return only the memory after the last step, (B, C, D), by one matrix product."""
        weights = self.response(u.shape[1]).flip(0)
        return torch.einsum("btc,td->bcd", u, weights)

    def response(self, length: int) -> Float[Tensor, "T D"]:
        """The impulse response (length, D), which is kept for the longest signal so far."""
        if len(self._response) < length:
            self._response = impulse_response(*self._exact, 2 ** math.ceil(math.log2(length))).float()
        if self._response.device != self.A.device:
            self._response = self._response.to(self.A.device)
        return self._response[:length]

    def _by_steps(self, u: Tensor, state: Tensor) -> Tensor:
        memories = []
        for step in u.unbind(1):
            state = state @ self.A.T + step[..., None] * self.B
            memories.append(state)
        return torch.stack(memories, 1)

    def _by_chunks(self, u: Tensor, state: Tensor) -> Tensor:
        batch, steps, channels = u.shape
        chunks = -(-steps // CHUNK)
        padded = F.pad(u, (0, 0, 0, chunks * CHUNK - steps)).view(batch, chunks, CHUNK, channels).transpose(2, 3)
        added = padded @ self.within[-self.order :, :CHUNK].T  # (B, chunks, C, D): by each chunk, at its end
        before = [state]
        for new in added.unbind(1)[:-1]:
            before.append(before[-1] @ self.over_a_chunk.T + new)
        known = torch.cat([padded, torch.stack(before, 1)], -1)  # (B, chunks, C, CHUNK + D)
        memory = (known @ self.within.T).unflatten(-1, (CHUNK, self.order))
        return memory.transpose(2, 3).flatten(1, 2)[:, :steps]

    def _by_fft(self, u: Tensor) -> Tensor:
        steps = u.shape[1]
        length = 2 ** math.ceil(math.log2(2 * steps))  # twice, or the end would run into the beginning
        spectrum = torch.fft.rfft(u.transpose(1, 2), length)[:, :, None]  # (B, C, 1, frequencies)
        memory = torch.fft.irfft(spectrum * torch.fft.rfft(self.response(steps).T, length), length)[..., :steps]
        return memory.permute(0, 3, 1, 2)
