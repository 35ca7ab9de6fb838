"""Rows of one expert, wherever it lives: fetched to every rank of the shard group, and written where it lives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from toolkit.moe.migrate import rows_of_states, rows_of_weights
from toolkit.moe.stack import ExpertStack


class ExpertRows:
    """The weights and optimizer rows of a layer's experts, by seat. `fetch` is a collective of each shard group.

    An expert's rows are broadcast whole, which is cheap beside the steps between two events of its life. Layers whose
    experts have copies are refused with ValueError.
    """

    def __init__(self, stack: ExpertStack, optimizer: Optimizer | None):
        if stack.placement.has_replicas:
            raise ValueError("experts that have copies neither grow nor end: use a planner that makes none")
        self.stack = stack
        self._tensors = rows_of_weights(stack) | rows_of_states(stack, optimizer)

    @torch.no_grad()
    def fetch(self, logical_id: int) -> dict[str, Tensor]:
        """Copies of the expert's rows: of weights by name (`up`), of optimizer states behind it (`up.exp_avg`)."""
        place, groups = self.stack.placement.owner(logical_id), self.stack.groups
        here = place.rank == groups.ep_rank
        rows = {n: t[place.slot].clone() if here else torch.empty_like(t[0]) for n, t in self._tensors.items()}
        if groups.ep_group is not None:
            for row in rows.values():
                dist.broadcast(row, group=groups.ep_group, group_src=place.rank)
        return rows

    @torch.no_grad()
    def write(self, logical_id: int, rows: Mapping[str, Tensor] | None) -> None:
        """Put `rows` where the expert on `logical_id` lives, on the ranks that have it; zeros for what is not in `rows`."""
        place = self.stack.placement.owner(logical_id)
        if place.rank != self.stack.groups.ep_rank:
            return
        for name, tensor in self._tensors.items():
            if rows is not None and name in rows:
                tensor[place.slot].copy_(rows[name])
            else:
                tensor[place.slot].zero_()
