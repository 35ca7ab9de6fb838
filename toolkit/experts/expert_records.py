"""Records of sharded experts as recipes write them, for any loop: load, balance, traffic, placement and migrations."""

from __future__ import annotations

from typing import Any

from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.routing.load_meter import LoadMeter


class PlacementChanges:
    """Placements of layers that changed since the last reading.

    Args:
        experts: The experts of the model.
    """

    def __init__(self, experts: Experts):
        self.experts = experts
        self.last: dict[str, list[list[int]]] = {}
        """Last placement by layer."""

    def read(self) -> dict[str, list[list[int]]]:
        """Return `moe/placement/<layer>` of the layers whose placement changed, at first of all. A host sync."""
        before, self.last = self.last, self.experts.on_ranks()
        return {f"moe/placement/{layer}": rows for layer, rows in self.last.items() if rows != before.get(layer)}


class ExpertRecords:
    """Reader of the records of a model's experts since the last reading.

    Args:
        experts: The experts of the model.
        replanner: Rebalances the experts. Default: none does.
        step: Optimizer steps so far.
    """

    def __init__(self, experts: Experts, replanner: Replanner | None = None, *, step: int = 0):
        self.meter, self.replanner, self.placements = LoadMeter(experts), replanner, PlacementChanges(experts)
        self.meter.began = step
        self.window, self.steps = self.meter.window, 0
        """The counts of the last reading, and its steps."""

    def read(self, step: int) -> dict[str, Any]:
        """Return the records up to `step`: see `docs/reference/metrics.md`. A collective, one reduction.

        The first reading has the placement. Later readings are empty without training forward passes.
        """
        self.meter.fold()
        self.window, self.steps = self.meter.window, step - self.meter.began
        shares, metrics = self.meter.read(step)
        values: dict[str, Any] = {**shares, **metrics}
        if self.replanner is not None and values:
            values |= self.replanner.read()
        is_sharded = any(stack.groups.ep_size > 1 for stack in self.meter.stacks)
        if is_sharded and (values or not self.placements.last):
            values |= self.placements.read()
        return values
