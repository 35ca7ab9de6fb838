"""Carries out plans: changes weights, optimizer states, router and roster together, in place.

All of it is collective: all ranks carry out the same plan between the same two steps. Parameters keep their shapes and
storages, so DDP and the optimizer need not know. Adam's step count belongs to the stacked parameter and is shared by
its experts; a new expert starts with its parent's moments, or with zeros where it is fresh.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit.experts.dynamic.dynamic_router import DynamicRouter, Hyperplane
from toolkit.experts.dynamic.expert_rows import ExpertRows
from toolkit.experts.dynamic.plans import Grow, Merge, Plan
from toolkit.experts.dynamic.roster import ExpertRoster
from toolkit.experts.dynamic.similarity import alignment, reordered
from toolkit.experts.layer.grouped_experts import GroupedExperts
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.parallel.unwrapping import unwrapped


class Surgeon:
    """Changes the experts of one layer. Raises ValueError for a layer without dynamic experts."""

    def __init__(self, layer: MoE, roster: ExpertRoster, optimizer: Optimizer | None, *, seed: int = 0):
        if not isinstance(layer.router, DynamicRouter):
            raise ValueError("this layer has no dynamic experts: make it with make_dynamic_moe")
        self.layer, self.router, self.roster, self.seed = layer, layer.router, roster, seed
        self.optimizer = optimizer

    def carry_out(self, plan: Plan, *, step: int, plane: Hyperplane | None = None) -> ExpertRoster:
        """Returns the roster afterwards, which `roster` is then too. A `Grow` needs a `plane`."""
        rows = ExpertRows(self.layer.expert_stack, self.optimizer)
        if isinstance(plan, Grow):
            assert plane is not None, "a split needs a hyperplane"
            self._grow(rows, plan, step, plane)
        else:
            removed = self.roster.logical_id_of(plan.uid)
            if isinstance(plan, Merge):
                self._average(rows, self.roster.logical_id_of(plan.into), removed, plan.share)
                self.roster = self.roster.merge(plan.uid, into=plan.into, step=step)
            else:
                self.roster = self.roster.prune(plan.uid, step=step)
            rows.write(removed, {})
            self.router.deactivate(removed)
            self._copy_router_states(removed, None)
        for parameter in (*self.layer.expert_stack.parameters.values(), self.router.weight):
            parameter.grad = None
        return self.roster

    def _grow(self, rows: ExpertRows, plan: Grow, step: int, plane: Hyperplane) -> None:
        parent = self.roster.logical_id_of(plan.parent)
        self.roster = self.roster.grow(plan.logical_id, step=step, parent=plan.parent)
        rows.write(plan.logical_id, self._fresh(self.roster.records[-1].uid) if plan.fresh else rows.fetch(parent))
        self.router.split(parent, plan.logical_id, plane)
        self._copy_router_states(plan.logical_id, parent)

    def _fresh(self, uid: int) -> dict[str, Tensor]:
        """The initial weights of an expert with this uid."""
        experts = self.layer.experts
        drawn = GroupedExperts(
            experts.up.shape[2],
            experts.down.shape[1],
            expert_ids=[uid],
            activation=experts.activation,
            seed=self.seed,
        )
        return {"up": drawn.up.data[0], "down": drawn.down.data[0]}

    @torch.no_grad()
    def _average(self, rows: ExpertRows, remains: int, removed: int, share: float) -> None:
        """Weights, moments and router row of `remains` become the mean of both experts', after alignment."""
        mine = rows.fetch(remains)
        other = rows.fetch(removed)
        other = reordered(other, alignment(mine, other))
        rows.write(remains, {name: torch.lerp(other[name], row, share) for name, row in mine.items()})
        weight = self.router.weight
        weight[remains] = torch.lerp(weight[removed], weight[remains], share)

    @torch.no_grad()
    def _copy_router_states(self, logical_id: int, source: int | None) -> None:
        """Copy the optimizer states of the router's row `source`; None sets zeros."""
        if self.optimizer is None:
            return
        for value in unwrapped(self.optimizer).state.get(self.router.weight, {}).values():
            if isinstance(value, Tensor) and value.shape == self.router.weight.shape:
                value[logical_id] = 0 if source is None else value[source]
