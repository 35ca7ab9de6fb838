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
from toolkit.moe.lifecycle.roster import Population
from toolkit.moe.lifecycle.router import SeatedRouter
from toolkit.moe.lifecycle.rows import ExpertRows
from toolkit.checkpoint.tensor_files import unwrapped


@dataclass(frozen=True)
class Divider:
    """The half-space of the router's input that a newborn takes over: where `direction_D` . x > `threshold`."""

    direction_D: Tensor
    threshold: float


class Surgeon:
    """Changes the population of one layer."""

    def __init__(self, layer: MoE, population: Population, optimizer: Optimizer | None, *, seed: int = 0):
        if not isinstance(layer.router, SeatedRouter):
            raise ValueError("this layer's router has no seats to fill: make it with `living`")
        self.layer, self.router, self.population, self.seed = layer, layer.router, population, seed
        self.optimizer = optimizer

    def carry_out(self, plan: Plan, *, step: int, divider: Divider | None = None) -> Population:
        """The population afterwards, also kept here. A `Grow` needs a `divider`."""
        if isinstance(plan, Grow):
            self._grow(plan, step, divider)
        elif isinstance(plan, Merge):
            self._merge(plan, step)
        else:
            self._prune(plan, step)
        for parameter in (*self.layer.expert_stack.parameters.values(), self.router.weight):
            parameter.grad = None
        return self.population

    def _grow(self, plan: Grow, step: int, divider: Divider | None) -> None:
        assert divider is not None, "a newborn needs a divider to take turns with its parent"
        rows = ExpertRows(self.layer.expert_stack, self.optimizer)
        beside = self.population.seat_of(plan.parent)
        born = self.population.grow(plan.seat, step=step, parent=plan.parent)
        rows.write(plan.seat, self._fresh(born.members[-1].id) if plan.fresh else rows.fetch(beside))
        self.router.seat(plan.seat, beside=beside)
        self.router.divide(plan.seat, beside, divider.direction_D, divider.threshold)
        self._router_states(plan.seat, beside)
        self.population = born

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
        heir, seat = self.population.seat_of(plan.into), self.population.seat_of(plan.id)
        mine, other = rows.fetch(heir), rows.fetch(seat)
        other = reordered(other, alignment(mine, other))
        rows.write(heir, {name: torch.lerp(other[name], row, plan.share) for name, row in mine.items()})
        rows.write(seat, None)
        with torch.no_grad():
            self.router.weight[heir] = torch.lerp(self.router.weight[seat], self.router.weight[heir], plan.share)
        self._leave(seat)
        self.population = self.population.merge(plan.id, into=plan.into, step=step)

    def _prune(self, plan: Prune, step: int) -> None:
        seat = self.population.seat_of(plan.id)
        ExpertRows(self.layer.expert_stack, self.optimizer).write(seat, None)
        self._leave(seat)
        self.population = self.population.prune(plan.id, step=step)

    def _leave(self, seat: int) -> None:
        self.router.vacate(seat)
        self._router_states(seat, None)

    @torch.no_grad()
    def _router_states(self, seat: int, beside: int | None) -> None:
        """Optimizer rows of the router: as those of another seat, or zeros."""
        if self.optimizer is None:
            return
        for value in unwrapped(self.optimizer).state.get(self.router.weight, {}).values():
            if isinstance(value, Tensor) and value.shape == self.router.weight.shape:
                value[seat] = 0 if beside is None else value[beside]
