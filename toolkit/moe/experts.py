"""Experts as stacked weights: one slot per row, multiplied as a group.

Stacking keeps every rank's parameters and gradients in place when an expert gets no tokens; a list of modules would
make DDP wait for gradients that never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from toolkit.moe.feed_forward import GroupedFeedForward
from toolkit.moe.grouped_mm import accepts, cast_as_autocast_would, grouped_mm
from toolkit.moe.recompute import checkpoint
from toolkit.parallel.ownership import EMPTY_ROW
from toolkit.seeding import generator

Activation = Literal["relu", "swiglu"]


class GroupedExperts(nn.Module):
    """S feed-forward experts `down(act(up(x)))` of hidden width F, without biases.

    `expert_ids` says which expert each slot holds, `EMPTY_ROW` where it is empty. An expert's initial
    weights depend on (seed, id) alone, so they are the same wherever it lives and however many ranks there are. With
    `recompute`, hidden activations are not kept for the backward but computed again.
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
        slots, self.activation, self.recompute = len(expert_ids), activation, recompute
        up_dim = 2 * hidden_dim if activation == "swiglu" else hidden_dim
        # A hidden unit is one row of `up` and one of `down`. For few rows per expert, products with `up` stored
        # like this cost a tenth less than with its transpose, and those with `down` no more.
        self.up = nn.Parameter(torch.empty(slots, up_dim, dim))
        self.down = nn.Parameter(torch.empty(slots, hidden_dim, dim))
        for slot, expert_id in enumerate(expert_ids):
            if expert_id == EMPTY_ROW:
                self.up.data[slot].zero_()
                self.down.data[slot].zero_()
                continue
            draws = generator(seed, "expert", expert_id)
            nn.init.normal_(self.up.data[slot], std=(2 / dim) ** 0.5, generator=draws)
            nn.init.normal_(self.down.data[slot], std=(2 * hidden_dim) ** -0.5, generator=draws)

    def forward(self, x_ND: Tensor, rows_per_slot: Tensor) -> Tensor:
        """`x_ND` holds slot 0's rows first, then slot 1's, and so on; `rows_per_slot` (int64, S) says how many."""
        x_ND, up, down = cast_as_autocast_would(x_ND, self.up, self.down)
        if accepts(x_ND, up) and accepts(x_ND, down):
            return GroupedFeedForward.apply(x_ND, up, down, rows_per_slot.cumsum(0).int(), self.recompute)
        if self.recompute:
            return checkpoint(self.step_by_step, x_ND, up, down, rows_per_slot)
        return self.step_by_step(x_ND, up, down, rows_per_slot)

    def step_by_step(self, x_ND: Tensor, up: Tensor, down: Tensor, rows_per_slot: Tensor) -> Tensor:
        """The same for every type and width, with autograd's own backward."""
        hidden = grouped_mm(x_ND, up.transpose(1, 2), rows_per_slot)
        if self.activation == "swiglu":
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = nn.functional.silu(gate) * hidden
        else:
            hidden = hidden.relu()
        return grouped_mm(hidden, down, rows_per_slot)
