"""Replanning while training: loads are read, plans are made and carried out, between two steps."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from toolkit.callbacks.base import Callback
from toolkit.errors import UserError
from toolkit.moe.load.routing_log import take_loads
from toolkit.moe.migrate import MigrationReport, migrate
from toolkit.moe.stack import ExpertStack, expert_stacks
from toolkit.parallel.unwrapping import unwrapped
from toolkit.placement.cost_model import measured_cost_model, state_bytes
from toolkit.placement.guard import CostModel, MigrationGuard
from toolkit.placement.imbalance import rank_imbalance, shares
from toolkit.placement.placement import ExpertPlacement
from toolkit.placement.plan import plan_layer
from toolkit.placement.planners.registry import planner_named

if TYPE_CHECKING:
    from toolkit.trainer import Trainer


COUNTED = frozenset({"node_of_rank", "source_load_RE", "together_EE"})
"""What planners may ask for besides the load, by the names of their arguments."""


@dataclass(frozen=True)
class Migration:
    """One layer's change of placement."""

    step: int
    layer: str
    placement: ExpertPlacement
    """In force after `step` steps."""
    predicted_imbalance: float
    """Busiest rank over the mean, had the last window's load met this placement."""
    former_imbalance: float
    """The same, of the placement that it replaced."""
    report: MigrationReport


def wanted_statistics(planner: str, options: Mapping[str, Any]) -> set[str]:
    """The planner's arguments without a default that `options` leave open, all of which training can count. Raises
    UserError for an unknown planner, and for one that wants something else."""
    arguments = inspect.signature(planner_named(planner)).parameters.values()
    wanted = {a.name for a in arguments if a.kind is a.KEYWORD_ONLY and a.default is a.empty} - set(options)
    if unknown := sorted(wanted - COUNTED):
        raise UserError(
            f"planner {planner!r} wants {', '.join(unknown)}, which training does not count: pass it among the "
            "planner's options, or take another planner."
        )
    return wanted


class Replanner:
    """Every `every` optimizer steps, asks `planner` where each layer's experts should live, and moves them there.

    The loads of the window are added up over all ranks, so all make the same plans. `guarded` has a guard for each
    layer, which refuses a plan that does not pay for its bytes, by the step times of this run, and orders the return
    to an earlier one that was better; without it every plan is carried out. `options` are the planner's.
    Raises UserError for an unknown planner.
    """

    def __init__(
        self,
        stacks: Mapping[str, ExpertStack],
        *,
        planner: str,
        every: int,
        guarded: bool = True,
        options: Mapping[str, Any] | None = None,
    ):
        self.options = dict(options or {})
        self.wanted = wanted_statistics(planner, self.options)
        if every < 1:
            raise UserError(f"replan_every={every}: take one step or more.")
        self.stacks, self.planner, self.every = dict(stacks), planner, every
        self.guarded = guarded
        self.guards: dict[str, MigrationGuard] = {}
        self.migrations: list[Migration] = []
        """What was carried out since the start of this process."""
        self.planner_seconds = 0.0
        """Spent on making plans on this rank, since the start of this process."""
        pairs = "together_EE" in self.wanted
        self._cursors = {name: stack.log.cursor(pairs=pairs) for name, stack in stacks.items()}
        self._ends: list[float] = []
        """When the steps of this window ended."""

    def after_step(self, step: int, optimizer: Optimizer) -> list[Migration]:
        """To be called after each optimizer step, the `step`-th, on all ranks; returns what moved. A collective."""
        self._ends.append(time.perf_counter())
        if step % self.every or not self.stacks:
            return []
        done = []
        statistics = self._statistics()
        loads = self._window()
        if self.guarded:
            self._set_cost_model(loads, optimizer)
        for (name, stack), load_E, known in zip(self.stacks.items(), loads, statistics, strict=True):
            current = stack.placement
            guard = self.guards.get(name)
            began = time.perf_counter()
            new = plan_layer(self.planner, load_E, current, guard=guard, steps=self.every, **known, **self.options)
            self.planner_seconds += time.perf_counter() - began
            if new is None:
                continue
            report = migrate(stack, new, optimizer)
            done.append(
                Migration(step, name, new, rank_imbalance(load_E, new), rank_imbalance(load_E, current), report)
            )
        self.migrations += done
        return done

    def _statistics(self) -> list[dict[str, Any]]:
        """What the planner wants to know of each layer besides its load. A collective."""
        known: list[dict[str, Any]] = []
        for name, stack in self.stacks.items():
            ranks, of_layer = stack.groups.ep_size, dict[str, Any]()
            if "node_of_rank" in self.wanted:
                per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
                of_layer["node_of_rank"] = [rank // per_node for rank in range(ranks)]
            if "source_load_RE" in self.wanted:
                of_layer["source_load_RE"] = self._cursors[name].new_source_load_RE().cpu().numpy()
            if "together_EE" in self.wanted:
                of_layer["together_EE"] = self._cursors[name].new_pairs_EE().cpu().numpy()
            known.append(of_layer)
        return known

    def _window(self) -> list[Tensor]:
        """float64 (E) of each layer: the mean rows per step and shard group since the last plan. A collective."""
        stacks = list(self.stacks.values())
        world = dist.get_world_size() if dist.is_initialized() else 1
        groups = world // stacks[0].groups.ep_size
        return [load_E.cpu().double() / (self.every * groups) for load_E in take_loads(list(self._cursors.values()))]

    def _set_cost_model(self, loads: list[Tensor], optimizer: Optimizer) -> None:
        """Have the guards reckon with the median step of this window, that of the slowest rank. A collective."""
        gaps = [after - before for before, after in pairwise(self._ends)]
        self._ends = []
        stacks, inner = list(self.stacks.values()), unwrapped(optimizer)
        # A rank whose experts never had a token may have no optimizer state yet: all reckon with the most of any.
        kept = [sum(state_bytes(p, inner) for p in stack.parameters.values()) for stack in stacks]
        agreed = torch.tensor([median(gaps) if gaps else 0.0, *kept], dtype=torch.float64)
        if dist.is_initialized():
            agreed = agreed.to(stacks[0].log.load_E.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        seconds, *optimizer_bytes = agreed.tolist()
        rows = sum(
            float((load_E.numpy() @ shares(stack.placement)).max()) for load_E, stack in zip(loads, stacks, strict=True)
        )
        for (name, stack), most in zip(self.stacks.items(), optimizer_bytes, strict=True):
            cost_model = measured_cost_model(stack.parameters.values(), None, step_seconds=seconds, rows=rows)
            cost_model = replace(cost_model, optimizer_bytes=int(most))
            if name in self.guards:
                self.guards[name].cost_model = cost_model
            else:
                self.guards[name] = MigrationGuard(cost_model)

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold; where experts are is in the checkpoint's manifest. A collective."""
        return {
            "slots_per_rank": {name: stack.placement.slots_per_rank for name, stack in self.stacks.items()},
            "window": {name: cursor.state_dict() for name, cursor in self._cursors.items()},
            "guards": {name: guard.state_dict() for name, guard in self.guards.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. On other ranks or slots the guards start without a history."""
        for name, stack in self.stacks.items():
            if name not in state["window"]:
                continue
            self._cursors[name].load_state_dict(state["window"][name])
            same_slots = state["slots_per_rank"][name] == stack.placement.slots_per_rank
            if self.guarded and same_slots and name in state["guards"]:
                # The cost model comes with the next window, before the guard is asked anything.
                self.guards[name] = MigrationGuard(CostModel(seconds_per_row=0.0, bytes_per_second=1.0, weight_bytes=0))
                self.guards[name].load_state_dict(state["guards"][name])


class Replan(Callback):
    """Moves experts between ranks every `every` steps, as `planner` says; None leaves them where they are.

    Records `moe/migrated_experts`, `moe/migration_bytes` and of these `moe/migration_optimizer_bytes`, each since the
    last line; `moe/migration_bytes_per_step` over the whole run; `moe/predicted_imbalance`, what the plans in force
    promised, mean over layers that have one, to hold beside `moe/rank_imbalance_of_sum`; and of this rank
    `perf/planner_ms` and `perf/migration_ms` since the last line. Leaves the sums of the run in its results.
    """

    def __init__(self, model: torch.nn.Module, *, planner: str | None, every: int, **options: Any):
        stacks = expert_stacks(model) if planner else {}
        self.replanner = Replanner(stacks, planner=planner or "contiguous", every=every, **options)
        self._experts = self._bytes = self._optimizer_bytes = 0
        self._predicted: dict[str, float] = {}
        self._seconds = (0.0, 0.0)
        """Of planning and of migrating up to the last line, in this process."""

    def on_step_end(self, trainer: Trainer) -> None:
        if not self.replanner.stacks:
            return
        moved = self.replanner.after_step(trainer.state.step, trainer.optimizer)
        self._experts += sum(migration.report.cost.experts for migration in moved)
        self._bytes += sum(migration.report.cost.bytes for migration in moved)
        self._optimizer_bytes += sum(migration.report.cost.optimizer_bytes for migration in moved)
        self._predicted |= {migration.layer: migration.predicted_imbalance for migration in moved}
        if trainer.at_log_step:
            trainer.record("moe/migrated_experts", self._experts)
            trainer.record("moe/migration_bytes", self._bytes)
            trainer.record("moe/migration_optimizer_bytes", self._optimizer_bytes)
            if self._predicted:
                trainer.record("moe/predicted_imbalance", fmean(self._predicted.values()))
            before = self._seconds
            self._seconds = (
                self.replanner.planner_seconds,
                sum(migration.report.seconds for migration in self.replanner.migrations),
            )
            trainer.record("perf/planner_ms", 1e3 * (self._seconds[0] - before[0]))
            trainer.record("perf/migration_ms", 1e3 * (self._seconds[1] - before[1]))
            for name, value in (("migrated_experts", self._experts), ("migration_bytes", self._bytes)):
                trainer.results[name] = trainer.results.get(name, 0) + value
            amortised = trainer.results["migration_bytes"] / trainer.state.step
            trainer.record("moe/migration_bytes_per_step", amortised)
            self._experts = self._bytes = self._optimizer_bytes = 0

    def state_dict(self) -> dict[str, Any]:
        if not self.replanner.stacks:
            return {}
        return {
            "replanner": self.replanner.state_dict(),
            "experts": self._experts,
            "bytes": self._bytes,
            "optimizer_bytes": self._optimizer_bytes,
            "predicted": self._predicted,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replanner.load_state_dict(state["replanner"])
        self._experts, self._bytes = state["experts"], state["bytes"]
        self._optimizer_bytes, self._predicted = state["optimizer_bytes"], dict(state["predicted"])
