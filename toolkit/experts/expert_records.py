"""Records of sharded experts as recipes write them, for any loop: load, balance, traffic, placement and migrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.layer.stack import weight_bytes
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.parallel.collectives import rank, world_size
from toolkit.experts.parallel.nodes import ranks_per_node
from toolkit.experts.routing.forwards import ModelForwards
from toolkit.experts.routing.metrics import (
    DispatchCounts,
    Window,
    balance_metrics,
    count,
    deduplicated_metrics,
    expert_metrics,
    rank_loads,
    replica_metrics,
    traffic_metrics,
)

MOST_WAITING = 512
"""Forwards whose loads are kept before they are reduced, if readings are rare."""


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
    """Reader of the records of a model's experts since the last reading, over forwards and ranks.

    Distinct tokens that go to other nodes are counted only for EP groups that span several. Layers may have different
    numbers of experts, and be called a different number of times; all ranks call a layer equally often.

    Args:
        experts: The experts of the model.
        replanner: Rebalances the experts. Default: none does.
        step: Optimizer steps so far.
    """

    def __init__(self, experts: Experts, replanner: Replanner | None = None, *, step: int = 0):
        self.forwards, self.replanner, self.placements = ModelForwards(experts), replanner, PlacementChanges(experts)
        self.names, self.stacks = self.forwards.names, self.forwards.stacks
        self.is_sharded = any(stack.groups.ep_size > 1 for stack in self.stacks)
        """Whether ranks share the experts."""
        # Counts are in the order of EP groups: first the ranks of the first group, and so on.
        self.order = [r for group in self.stacks[0].groups.ep_groups for r in group]
        self.place, self.world_size = self.order.index(rank()), world_size()
        per_node = ranks_per_node(self.world_size)
        self.node_of_place = [r // per_node for r in self.order]
        for stack in self.stacks:
            first = self.place - stack.groups.ep_rank
            nodes = self.node_of_place[first : first + stack.groups.ep_size]
            if len(set(nodes)) > 1:
                stack.count_crossings(nodes)
        self.window = self.empty()
        """The sums since the last reading."""
        self.began = step
        """The step at which `window` began."""
        self.load_LE = self.window.load_LE
        """Assignments of each expert in all forwards that were folded."""

    def fold_when_many(self) -> None:
        """Call `fold` if many forwards wait. A collective then, so call it on all ranks after the same steps."""
        if len(self.forwards) >= MOST_WAITING:
            self.fold()

    def fold(self) -> None:
        """Add all ranks' new forwards to the window. A collective, one reduction."""
        counts: DispatchCounts | None = None
        for placements, sent_FLE, dropped_FLE, visits_FLR, crossings_FLR in self.forwards.take(fill=True):
            here = count(
                sent_FLE.cpu().numpy()[:, :, None],
                placements,
                sources=[self.place],
                world_size=self.world_size,
                dropped_LE=dropped_FLE.sum(0).cpu().numpy(),
                visits_LSR=visits_FLR.sum(0).cpu().numpy()[:, None],
                crossings_LSR=crossings_FLR.sum(0).cpu().numpy()[:, None],
            )
            counts = here if counts is None else counts.then(here)
        if counts is None:
            return
        if dist.is_initialized():
            flat = torch.from_numpy(counts.flat()).to(self.stacks[0].log.load_E.device)
            dist.all_reduce(flat)
            counts = counts.unflat(flat.cpu().numpy())
        self.window = self.window.then(Window.of(counts))
        self.load_LE = self.load_LE + counts.load_LE

    def read(self, step: int) -> dict[str, Any]:
        """Return the records up to `step`: see `docs/reference/metrics.md`. A collective, one reduction.

        The first reading has the placement. Later readings are empty without training forward passes.
        """
        values = self.read_loads(step)
        if self.replanner is not None and values:
            values |= self.replanner.read()
        if self.is_sharded and (values or not self.placements.last):
            values |= self.placements.read()
        return values

    def read_loads(self, step: int) -> dict[str, Any]:
        """Return each layer's fractions of assignments per expert, with expert parallelism its fractions of rows per
        rank, and all other metrics, up to `step`; empty without training forward passes. Begins a new window. A
        collective, one reduction."""
        self.fold()
        window, self.window = self.window, self.empty()
        steps, self.began = step - self.began, step
        if not window.load_LE.any():
            return {}
        layers = zip(self.names, self.stacks, window.load_LE, strict=True)
        values: dict[str, Any] = {
            f"moe/load/{name}": (load_E[: stack.num_experts] / load_E.sum()).tolist()
            for name, stack, load_E in layers
            if load_E.any()
        }
        active = zip(window.load_LE, self.forwards.active(), strict=True)
        values |= expert_metrics([load_E[active_E] for load_E, active_E in active if load_E.any()])
        if self.forwards.may_drop:
            values["moe/dropped_fraction"] = float(window.dropped_LE.sum() / window.load_LE.sum())
        if self.is_sharded:
            for name, rows_W in zip(self.names, rank_loads(window), strict=True):
                if rows_W.any():
                    of_rank = dict(zip(self.order, (rows_W / rows_W.sum()).tolist(), strict=True))
                    values[f"moe/rank_load/{name}"] = [of_rank[rank] for rank in range(self.world_size)]
            placements = [stack.placement for stack in self.stacks]
            values |= balance_metrics(window, placements)
            values |= traffic_metrics(
                window,
                self.forwards.row_bytes,
                steps=max(1, steps),
                node_of_rank=self.node_of_place,
                hierarchical=self.stacks[0].groups.nodes is not None,
            )
            values |= deduplicated_metrics(window)
            values |= replica_metrics(placements, [weight_bytes(stack) for stack in self.stacks])
        return values

    def begin(self, step: int) -> None:
        """Begin a new window at `step`, without earlier counts."""
        self.forwards.take(fill=True)
        self.window = self.empty()
        self.began = step

    def empty(self) -> Window:
        """Return a window of no forwards."""
        group, layers = self.stacks[0].groups.ep_size, len(self.stacks)
        none_LE = np.zeros((layers, self.forwards.num_experts), dtype=np.int64)
        sent_LWR = np.zeros((layers, self.world_size, group), dtype=np.int64)
        return Window(none_LE, none_LE, sent_LWR, sent_LWR, sent_LWR, np.zeros((0, layers)))

    def state_dict(self) -> dict[str, Any]:
        return {"line": self.window.to_dict(), "line_began": self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin(state["line_began"])
        self.window = Window.from_dict(state["line"], self.empty())
