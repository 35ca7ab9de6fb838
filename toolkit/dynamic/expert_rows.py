"""The rows of one expert in the stacked tensors, read on every rank and written on the rank that holds the expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.moving.migrate import rows_of_states, rows_of_weights


class ExpertRows:
    """Weights and optimizer states of a layer's experts, by logical id. `fetch` is a collective of each EP group.

    A fetch broadcasts the whole expert, which is cheap as changes are rare. Raises ValueError for a layer with
    replicated experts.
    """

    def __init__(self, stack: ExpertStack, optimizer: Optimizer | None):
        if stack.placement.has_replicas:
            raise ValueError("replicated experts can neither grow nor be removed: use a planner without replicas")
        self.stack = stack
        self._tensors = rows_of_weights(stack) | rows_of_states(stack, optimizer)

    @torch.no_grad()
    def fetch(self, logical_id: int) -> dict[str, Tensor]:
        """Returns the expert's rows, cloned: weights by name (`up`), optimizer states by both names (`up.exp_avg`)."""
        owner = self.stack.placement.owner(logical_id)
        groups = self.stack.groups
        here = owner.rank == groups.ep_rank
        rows = {n: t[owner.slot].clone() if here else torch.empty_like(t[0]) for n, t in self._tensors.items()}
        if groups.ep_group is not None:
            for row in rows.values():
                dist.broadcast(row, group=groups.ep_group, group_src=owner.rank)
        return rows

    @torch.no_grad()
    def write(self, logical_id: int, rows: Mapping[str, Tensor]) -> None:
        """Overwrite the expert's rows on the ranks that hold it, with zeros for names that are not in `rows`."""
        owner = self.stack.placement.owner(logical_id)
        if owner.rank != self.stack.groups.ep_rank:
            return
        for name, tensor in self._tensors.items():
            if name in rows:
                tensor[owner.slot].copy_(rows[name])
            else:
                tensor[owner.slot].zero_()
