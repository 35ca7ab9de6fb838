"""Carrying out plans: weights, optimizer rows, router rows and the population change together, in place.

Collectives: all ranks carry out the same plan between the same two steps. Parameters keep their shapes and storages,
so DDP, the optimizer and whoever refers to them notice nothing. Adam's count of steps belongs to the stack and is
shared by its experts; a newborn's moments are its parent's, or zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit.moe.experts import GroupedExperts
from toolkit.moe.layer import MoE
from toolkit.moe.lifecycle.alignment import alignment, reordered
from toolkit.moe.lifecycle.plans import Grow, Merge, Plan, Prune
from toolkit.moe.lifecycle.roster import ExpertRoster
from toolkit.moe.lifecycle.router import DynamicRouter
from toolkit.moe.lifecycle.rows import ExpertRows
from toolkit.parallel.unwrapping import unwrapped


@dataclass(frozen=True)
class Divider:
    """The half-space of the router's input that a newborn takes over: where `direction_D` . x > `threshold`."""

    direction_D: Tensor
    threshold: float


class Surgeon:
    """Changes the population of one layer."""

    def __init__(self, layer: MoE, roster: ExpertRoster, optimizer: Optimizer | None, *, seed: int = 0):
        if not isinstance(layer.router, DynamicRouter):
            raise ValueError("this layer's router has no seats to fill: make it with `active`")
        self.layer, self.router, self.roster, self.seed = layer, layer.router, roster, seed
        self.optimizer = optimizer

    def carry_out(self, plan: Plan, *, step: int, divider: Divider | None = None) -> ExpertRoster:
        """The population afterwards, also kept here. A `Grow` needs a `divider`."""
        if isinstance(plan, Grow):
            self._grow(plan, step, divider)
        elif isinstance(plan, Merge):
            self._merge(plan, step)
        else:
            self._prune(plan, step)
        for parameter in (*self.layer.expert_stack.parameters.values(), self.router.weight):
            parameter.grad = None
        return self.roster

    def _grow(self, plan: Grow, step: int, divider: Divider | None) -> None:
        assert divider is not None, "a newborn needs a divider to take turns with its parent"
        rows = ExpertRows(self.layer.expert_stack, self.optimizer)
        beside = self.roster.logical_id_of(plan.parent)
        created_at = self.roster.grow(plan.logical_id, step=step, parent=plan.parent)
        rows.write(plan.logical_id, self._fresh(created_at.records[-1].id) if plan.fresh else rows.fetch(beside))
        self.router.logical_id(plan.logical_id, beside=beside)
        self.router.divide(plan.logical_id, beside, divider.direction_D, divider.threshold)
        self._router_states(plan.logical_id, beside)
        self.roster = created_at

    def _fresh(self, id: int) -> dict[str, Tensor]:
        """Weights as an expert of this id would have had them from the start."""
        experts = self.layer.experts
        drawn = GroupedExperts(
            experts.up.shape[2],
            experts.down.shape[1],
            expert_ids=[id],
            activation=experts.activation,
            seed=self.seed,
        )
        return {"up": drawn.up.data[0], "down": drawn.down.data[0]}

    def _merge(self, plan: Merge, step: int) -> None:
        rows = ExpertRows(self.layer.expert_stack, self.optimizer)
        merged_into, logical_id = self.roster.logical_id_of(plan.into), self.roster.logical_id_of(plan.id)
        mine, other = rows.fetch(merged_into), rows.fetch(logical_id)
        other = reordered(other, alignment(mine, other))
        rows.write(merged_into, {name: torch.lerp(other[name], row, plan.share) for name, row in mine.items()})
        rows.write(logical_id, None)
        with torch.no_grad():
            self.router.weight[merged_into] = torch.lerp(
                self.router.weight[logical_id], self.router.weight[merged_into], plan.share
            )
        self._leave(logical_id)
        self.roster = self.roster.merge(plan.id, into=plan.into, step=step)

    def _prune(self, plan: Prune, step: int) -> None:
        logical_id = self.roster.logical_id_of(plan.id)
        ExpertRows(self.layer.expert_stack, self.optimizer).write(logical_id, None)
        self._leave(logical_id)
        self.roster = self.roster.prune(plan.id, step=step)

    def _leave(self, logical_id: int) -> None:
        self.router.vacate(logical_id)
        self._router_states(logical_id, None)

    @torch.no_grad()
    def _router_states(self, logical_id: int, beside: int | None) -> None:
        """Optimizer rows of the router: as those of another seat, or zeros."""
        if self.optimizer is None:
            return
        for value in unwrapped(self.optimizer).state.get(self.router.weight, {}).values():
            if isinstance(value, Tensor) and value.shape == self.router.weight.shape:
                value[logical_id] = 0 if beside is None else value[beside]
