"""Rebalancing while training: between two steps, loads are read, plans made, and experts moved."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from toolkit.experts.layer.routing_log import Sample, sample_forwards, take_loads
from toolkit.experts.layer.stack import ExpertStack, optimizer_bytes, weight_bytes
from toolkit.experts.moving.migrate import MigrationReport, migrate
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.collectives import is_main, world_size
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard, plan_layer
from toolkit.experts.placement.loads import rank_imbalance, shares
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.planners import Planner, find_planner

MOST_SAMPLED, FEWEST_SAMPLED = 4096, 32
"""Tokens sampled for the guard's traffic estimate: maximum over all ranks, minimum of each rank."""


@dataclass(frozen=True)
class Migration:
    """One layer's change of placement."""

    step: int
    layer: str
    placement: ExpertPlacement
    """Used after `step` steps."""
    predicted_imbalance: float
    """Busiest rank over the mean, for the last window's load under this placement."""
    report: MigrationReport


class Replanner:
    """Periodic rebalancing: every `options.every` optimizer steps, a planner proposes a placement of each layer.

    The loads of the window are summed over all ranks, so all make the same plans. With `options.guarded`, each layer
    has a guard (`toolkit.experts.placement.guard`). The first rejection for each reason is printed.

    Args:
        stacks: The experts to plan for, by layer.
        options: The planner (default: "swap"), its period, and the guard's assumptions.
    """

    def __init__(self, stacks: Mapping[str, ExpertStack], options: ReplanOptions):
        self.options = options
        planner = options.planner or "swap"
        self.planner: Planner = find_planner(planner) if isinstance(planner, str) else planner
        self.guards: dict[str, MigrationGuard] = {}
        self.migrations: list[Migration] = []
        """Migrations of this process."""
        self.window_imbalance = 1.0
        """Busiest rank over the mean in the last window, mean over layers."""
        self.planner_seconds = 0.0
        """Spent on planning by this process."""
        self._explained: set[str] = set()
        """Reasons of the guard that were printed, without their numbers."""
        self.watch(stacks)

    def watch(self, stacks: Mapping[str, ExpertStack]) -> None:
        """Plan for `stacks`, by layer, from now on."""
        self.stacks = dict(stacks)
        self._cursors = {name: stack.log.cursor() for name, stack in stacks.items()}
        self._ends: list[float] = []
        """When the steps of this window ended, for the guard."""

    def after_step(self, step: int, optimizer: Optimizer) -> list[Migration]:
        """Plan and migrate after the `step`-th optimizer step, if a plan is due. A collective: call it on all ranks.

        Returns:
            The migrations.
        """
        if self.options.guarded:
            self._ends.append(time.perf_counter())
        if step % self.options.every or not self.stacks:
            return []
        stacks = list(self.stacks.values())
        groups = world_size() // stacks[0].groups.ep_size
        # Mean pairs per step and EP group.
        sums = take_loads(list(self._cursors.values()))
        loads = [load_E.cpu().double() / (self.options.every * groups) for load_E in sums]
        self.window_imbalance = fmean(
            rank_imbalance(load_E, stack.placement) for load_E, stack in zip(loads, stacks, strict=True)
        )
        samples: list[Sample | None] = [None] * len(loads)
        if self.options.guarded:
            samples = sample_forwards(
                [stack.log for stack in stacks], max(MOST_SAMPLED // world_size(), FEWEST_SAMPLED)
            )
            self._set_cost_model(loads, samples, optimizer)
        done = []
        for (name, stack), load_E, sample in zip(self.stacks.items(), loads, samples, strict=True):
            guard = self.guards.get(name)
            began = time.perf_counter()
            new = plan_layer(
                self.planner,
                load_E,
                stack.placement,
                guard=guard,
                steps=self.options.every,
                choices_PTK=None if sample is None else sample.choices_STK,
            )
            self.planner_seconds += time.perf_counter() - began
            if guard is not None and guard.refused:
                self._explain(step, name, guard.reason)
            if new is not None:
                report = migrate(stack, new, optimizer)
                done.append(Migration(step, name, new, rank_imbalance(load_E, new), report))
        self.migrations += done
        return done

    @property
    def plans_refused(self) -> int:
        """Plans rejected by the guards, in this process."""
        return sum(guard.refused for guard in self.guards.values())

    def _explain(self, step: int, layer: str, reason: str) -> None:
        """Print the guard's reason to reject a plan, the first time that it occurs."""
        kind = re.sub(r"[\d.e+-]+", "", reason)
        if kind not in self._explained and is_main():
            text = f"step {step:,}: the guard refuses a plan for {layer}: {reason} (moe/plans_refused).\n"
            sys.stdout.write(text)
            sys.stdout.flush()
        self._explained.add(kind)

    def _set_cost_model(self, loads: list[Tensor], samples: list[Sample | None], optimizer: Optimizer) -> None:
        """Give the guards the median step time of this window, of the slowest rank. A collective.

        Each pair of the busiest rank, over all layers, has its part of the step."""
        gaps = [after - before for before, after in pairwise(self._ends)]
        self._ends = []
        stacks = list(self.stacks.values())
        # A rank whose experts never had a token may have no optimizer state yet: all take the largest of any.
        kept = [optimizer_bytes(stack, optimizer) for stack in stacks]
        agreed = torch.tensor([median(gaps) if gaps else 0.0, *kept], dtype=torch.float64)
        if dist.is_initialized():
            agreed = agreed.to(stacks[0].log.load_E.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        seconds, *most_kept = agreed.tolist()
        rows = sum(
            float((load_E.numpy() @ shares(stack.placement)).max()) for load_E, stack in zip(loads, stacks, strict=True)
        )
        for (name, stack), most, sample in zip(self.stacks.items(), most_kept, samples, strict=True):
            cost_model = CostModel(
                seconds_per_row=self.options.expert_time_share * seconds / max(rows, 1.0),
                bytes_per_second=self.options.link_gbytes_per_second * 1e9,
                weight_bytes=weight_bytes(stack),
                optimizer_bytes=int(most),
                row_bytes=0 if sample is None else sample.row_bytes,
            )
            guard = self.guards.setdefault(name, MigrationGuard(cost_model))
            guard.cost_model = cost_model

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values, without the placement, which is in the checkpoint's manifest. A collective."""
        return {
            "slots_per_rank": {name: stack.placement.slots_per_rank for name, stack in self.stacks.items()},
            "window": {name: cursor.state_dict() for name, cursor in self._cursors.items()},
            "guards": {name: guard.state_dict() for name, guard in self.guards.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. On other ranks or slots the guards start without a history."""
        for name, stack in self.stacks.items():
            if name not in state["window"]:
                continue
            self._cursors[name].load_state_dict(state["window"][name])
            same_slots = state["slots_per_rank"][name] == stack.placement.slots_per_rank
            if self.options.guarded and same_slots and name in state["guards"]:
                # The cost model comes with the next window, before the guard is asked anything.
                self.guards[name] = MigrationGuard(CostModel(seconds_per_row=0.0, bytes_per_second=1.0, weight_bytes=0))
                self.guards[name].load_state_dict(state["guards"][name])
