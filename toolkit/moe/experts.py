"""Experts as stacked weights: one slot per row, one grouped matrix product for all of them.

Stacking keeps every rank's parameters and gradients in place when an expert gets no tokens; a list of modules would
make DDP wait for gradients that never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from toolkit.moe.grouped_mm import grouped_mm
from toolkit.parallel import ShardGroups, mark_sharded
from toolkit.seeding import generator

Activation = Literal["relu", "swiglu"]


class GroupedExperts(nn.Module):
    """S feed-forward experts `down(act(up(x)))` of hidden width F, without biases.

    `expert_ids` says which expert each slot holds. An expert's initial weights depend on (seed, id) alone, so they
    are the same wherever it lives and however many ranks there are.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        expert_ids: Sequence[int],
        groups: ShardGroups,
        activation: Activation = "relu",
        seed: int = 0,
    ):
        super().__init__()
        slots, self.activation = len(expert_ids), activation
        up_dim = 2 * hidden_dim if activation == "swiglu" else hidden_dim
        self.up = nn.Parameter(torch.empty(slots, dim, up_dim))
        self.down = nn.Parameter(torch.empty(slots, hidden_dim, dim))
        for slot, expert_id in enumerate(expert_ids):
            draws = generator(seed, "expert", expert_id)
            nn.init.normal_(self.up.data[slot], std=(2 / dim) ** 0.5, generator=draws)
            nn.init.normal_(self.down.data[slot], std=(2 * hidden_dim) ** -0.5, generator=draws)
        for parameter in (self.up, self.down):
            mark_sharded(parameter, row_ids=expert_ids, groups=groups)

    def forward(self, x_ND: Tensor, rows_per_slot: Tensor) -> Tensor:
        """`x_ND` holds slot 0's rows first, then slot 1's, and so on; `rows_per_slot` (int64, S) says how many."""
        hidden = grouped_mm(x_ND, self.up, rows_per_slot)
        if self.activation == "swiglu":
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = nn.functional.silu(gate) * hidden
        else:
            hidden = hidden.relu()
        return grouped_mm(hidden, self.down, rows_per_slot)
