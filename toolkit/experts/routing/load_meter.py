"""Balance and traffic metrics since the last reading: for `ExpertLoad` and `ExpertParallel.metrics`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.layer.stack import weight_bytes
from toolkit.experts.parallel.collectives import rank, world_size
from toolkit.experts.parallel.nodes import ranks_per_node as launched_per_node
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


class LoadMeter:
    """Sums the routing logs of all layers of `experts` over forwards and ranks.

    `ranks_per_node` None takes the launcher's number. Distinct tokens that go to other nodes are counted only for EP
    groups that span several. Layers may have different numbers of experts, and be called a different number of times;
    all ranks call a layer equally often.
    """

    def __init__(self, experts: Experts, *, ranks_per_node: int | None = None):
        self.forwards = ModelForwards(experts)
        self.names, self.stacks = self.forwards.names, self.forwards.stacks
        # Counts are in the order of EP groups: first the ranks of the first group, and so on.
        self.order = [r for group in self.stacks[0].groups.ep_groups for r in group] if self.stacks else [rank()]
        self.place, self.world_size = self.order.index(rank()), world_size()
        per_node = ranks_per_node or launched_per_node(self.world_size)
        self.node_of_place = [r // per_node for r in self.order]
        for stack in self.stacks:
            first = self.place - stack.groups.ep_rank
            nodes = self.node_of_place[first : first + stack.groups.ep_size]
            exchange = stack.groups.nodes
            if exchange is not None and len(set(nodes)) != exchange.count:
                raise ValueError(f"ranks_per_node={per_node}, but rows are exchanged between {exchange.count} nodes")
            if len(set(nodes)) > 1:
                stack.count_crossings(nodes)
        self.window = self.empty()
        """The sums since the last `read`."""
        self.began = 0
        """The step at which `window` began."""

    def fold_when_many(self) -> Window | None:
        """Call `fold` if many forwards wait. A collective then, so call it on all ranks after the same steps."""
        return self.fold() if len(self.forwards) >= MOST_WAITING else None

    def fold(self) -> Window | None:
        """Add all ranks' new forwards to the window and returns them. A collective, one reduction."""
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
            return None
        if dist.is_initialized():
            flat = torch.from_numpy(counts.flat()).to(self.stacks[0].log.load_E.device)
            dist.all_reduce(flat)
            counts = counts.unflat(flat.cpu().numpy())
        window = Window.of(counts)
        self.window = self.window.then(window)
        return window

    def read(self, step: int) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Return each layer's fractions of assignments per expert, with expert parallelism its fractions of rows per
        rank, and all other metrics, of the folded steps up to `step`; empty without training forward passes. Begins a
        new window."""
        window, self.window = self.window, self.empty()
        steps, self.began = step - self.began, step
        if not window.load_LE.any():
            return {}, {}
        layers = zip(self.names, self.stacks, window.load_LE, strict=True)
        shares = {
            f"moe/load/{name}": (load_E[: stack.num_experts] / load_E.sum()).tolist()
            for name, stack, load_E in layers
            if load_E.any()
        }
        active = zip(window.load_LE, self.forwards.active(), strict=True)
        metrics = expert_metrics([load_E[active_E] for load_E, active_E in active if load_E.any()])
        if self.forwards.may_drop:
            metrics["moe/dropped_fraction"] = float(window.dropped_LE.sum() / window.load_LE.sum())
        if self.stacks[0].groups.ep_size > 1:
            for name, rows_W in zip(self.names, rank_loads(window), strict=True):
                if rows_W.any():
                    of_rank = dict(zip(self.order, (rows_W / rows_W.sum()).tolist(), strict=True))
                    shares[f"moe/rank_load/{name}"] = [of_rank[rank] for rank in range(self.world_size)]
            placements = [stack.placement for stack in self.stacks]
            metrics |= balance_metrics(window, placements)
            metrics |= traffic_metrics(
                window,
                self.forwards.row_bytes,
                steps=max(1, steps),
                node_of_rank=self.node_of_place,
                hierarchical=self.stacks[0].groups.nodes is not None,
            )
            metrics |= deduplicated_metrics(window)
            metrics |= replica_metrics(placements, [weight_bytes(stack) for stack in self.stacks])
        return shares, metrics

    def begin(self, step: int) -> None:
        """Begin a new window at `step`, without earlier counts."""
        self.forwards.take(fill=True)
        self.window = self.empty()
        self.began = step

    def empty(self) -> Window:
        """Return a window of no forwards."""
        group = self.stacks[0].groups.ep_size if self.stacks else 1
        layers = len(self.stacks)
        none_LE = np.zeros((layers, self.forwards.num_experts), dtype=np.int64)
        sent_LWR = np.zeros((layers, self.world_size, group), dtype=np.int64)
        return Window(none_LE, none_LE, sent_LWR, sent_LWR, sent_LWR, np.zeros((0, layers)))

    def state_dict(self) -> dict[str, Any]:
        return {"line": self.window.to_dict(), "line_began": self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin(state["line_began"])
        self.window = Window.from_dict(state["line"], self.empty())
