"""The experts of a rank as stacked weights, one row per slot, for grouped matrix products.

Stacked parameters have a gradient even if an expert gets no tokens. With a list of modules DDP would wait for gradients
that never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.experts.layer.feed_forward import GroupedFeedForward, LaterGradients, TakeLater
from toolkit.experts.layer.grouped_mm import accepts, cast_as_autocast_would, grouped_mm
from toolkit.experts.layer.recompute import checkpoint
from toolkit.experts.layer.rows import Pairs
from toolkit.experts.parallel.seeding import generator
from toolkit.experts.placement.placement import EMPTY_ROW

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Activation = Literal["relu", "swiglu"]


class Weights(NamedTuple):
    """Both weights of all experts of a rank."""

    up: Float[Tensor, "S H D"]
    down: Float[Tensor, "S F D"]
    later: LaterGradients | None
    """The deferred computation of their gradients; None if autograd computes them at once."""


class GroupedExperts(nn.Module):
    """S feed-forward experts `down(act(up(x)))` of hidden width F, without biases.

    `expert_ids`: the expert in each slot, `EMPTY_ROW` for an empty one. Initial weights are a function of (seed, expert
    id), so they do not depend on the placement or the number of ranks. With `recompute`, hidden activations are
    recomputed in the backward instead of stored.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        expert_ids: Sequence[int],
        activation: Activation = "relu",
        recompute: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        slots = len(expert_ids)
        self.activation = activation
        self.recompute = recompute
        up_dim = 2 * hidden_dim if activation == "swiglu" else hidden_dim
        # A hidden unit is one row of `up` and one of `down`. With few rows per expert, products with `up` in this
        # layout take 10 % less time than with its transpose, and those with `down` no more.
        self.up = nn.Parameter(torch.zeros(slots, up_dim, dim))
        self.down = nn.Parameter(torch.zeros(slots, hidden_dim, dim))
        for slot, expert_id in enumerate(expert_ids):
            if expert_id == EMPTY_ROW:
                continue
            draws = generator(seed, "expert", expert_id)
            for weight, std in ((self.up, (2 / dim) ** 0.5), (self.down, (2 * hidden_dim) ** -0.5)):
                # Drawn on the CPU, whatever the default device is: the same weights everywhere.
                row = torch.empty(weight.shape[1:], dtype=weight.dtype, device="cpu")
                weight.data[slot].copy_(row.normal_(std=std, generator=draws))

    def weights(self) -> Weights:
        """Return weights for `forward` whose gradients are computed late: autograd runs the backward of everything
        that was computed between this call and `forward` first, because no other gradient depends on them."""
        later = LaterGradients()
        up, down = TakeLater.apply(self.up, self.down, later)
        return Weights(up, down, later)

    def forward(
        self,
        x: Float[Tensor, "N D"] | Float[Tensor, "R D"],
        rows_per_slot: Int[Tensor, " S"],
        weights: Weights | None = None,
        pairs: Pairs | None = None,
    ) -> Float[Tensor, "N D"] | Float[Tensor, "R D"]:
        """(N, D) to (N, D), rows in slot order; with `pairs`, (R, D) to (R, D), the weighted sums of a row's pairs.

        `rows_per_slot`: int64 (S), without rows for slots after the last of the weights (see
        `toolkit.experts.parallel.rows_in_use.RowsInUse`).
        """
        up, down, later = weights or Weights(self.up, self.down, None)
        if len(rows_per_slot) > len(self.up):
            rows_per_slot = rows_per_slot[: len(self.up)]
        x, up, down = cast_as_autocast_would(x, up, down)
        if accepts(x, up) and accepts(x, down):
            ends_S = rows_per_slot.cumsum(0, dtype=torch.int32)
            of_pairs = () if pairs is None else (pairs.weights_RK, pairs.order, pairs.ranks)
            return GroupedFeedForward.apply(x, up, down, ends_S, self.recompute, later, *of_pairs)
        rows_ND = x if pairs is None else pairs.permute(x)
        if self.recompute:
            rows_ND = checkpoint(self.step_by_step, rows_ND, up, down, rows_per_slot)
        else:
            rows_ND = self.step_by_step(rows_ND, up, down, rows_per_slot)
        return rows_ND if pairs is None else pairs.unpermute(rows_ND)

    def step_by_step(
        self,
        x_ND: Float[Tensor, "N D"],
        up: Float[Tensor, "S H D"],
        down: Float[Tensor, "S F D"],
        rows_per_slot: Int[Tensor, " S"],
    ) -> Float[Tensor, "N D"]:
        """`forward` for any dtype and width, with autograd's own backward."""
        hidden = grouped_mm(x_ND, up.transpose(1, 2), rows_per_slot)
        if self.activation == "swiglu":
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = nn.functional.silu(gate) * hidden
        else:
            hidden = hidden.relu()
        return grouped_mm(hidden, down, rows_per_slot)
