"""Rebalancing while training: between two steps, loads are read, plans made, and experts moved."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch.optim import Optimizer

from toolkit.experts.layer.routing_log import Sample, sample_forwards, take_parts
from toolkit.experts.layer.stack import ExpertStack, weight_bytes
from toolkit.experts.moving.migrate import MigrationReport, migrate, optimizer_bytes
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.collectives import extremes_over_ranks, is_main, sum_over_ranks, world_size
from toolkit.experts.parallel.waits import seconds_between, seconds_per_byte
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard, plan_layer
from toolkit.experts.placement.loads import Window, rank_imbalance, shares, steps_of_parts
from toolkit.experts.placement.placement import ExpertPlacement, with_spare_slots
from toolkit.experts.placement.planners import Planner, find_planner, replicate, swap

MOST_SAMPLED, FEWEST_SAMPLED = 4096, 32
"""Tokens sampled for the guard's traffic estimate: maximum over all ranks, minimum of each rank."""
SPARE_SLOT_GAIN = 0.1
"""Least imbalance that a spare slot has to save to be advised."""


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


@dataclass(frozen=True)
class Decision:
    """The plans of all layers at the end of a window."""

    step: int = 0
    imbalance: float = 1.0
    """Busiest rank over the mean in the window, mean over layers."""
    migrations: tuple[Migration, ...] = ()
    plans_refused: int = 0
    """Plans that the guards rejected."""
    planner_seconds: float = 0.0
    """Spent on planning by this process."""

    def sums(self) -> dict[str, float]:
        """Return the metrics that add up over decisions; times are of this process."""
        reports = [migration.report for migration in self.migrations]
        return {
            "moe/migrated_experts": sum(report.cost.experts for report in reports),
            "moe/migration_bytes": sum(report.cost.bytes for report in reports),
            "moe/migration_optimizer_bytes": sum(report.cost.optimizer_bytes for report in reports),
            "moe/plans_refused": self.plans_refused,
            "perf/planner_ms": 1e3 * self.planner_seconds,
            "perf/migration_ms": 1e3 * sum(report.seconds for report in reports),
        }


class Replanner:
    """Periodic rebalancing: every `options.every` optimizer steps, a planner proposes a placement of each layer.

    The loads of the window are summed over all ranks, so all make the same plans. With `options.guarded`, each layer
    has a guard (`toolkit.experts.placement.guard`). The first rejection for each reason is printed, and once what a
    spare slot on each rank would save.

    Args:
        stacks: The experts to plan for, by layer.
        options: The planner (default: "swap"), its period, and whether plans are guarded.
    """

    def __init__(self, stacks: Mapping[str, ExpertStack], options: ReplanOptions):
        self.options = options
        planner = options.planner or "swap"
        self.planner: Planner = find_planner(planner) if isinstance(planner, str) else planner
        self.guards: dict[str, MigrationGuard] = {}
        self.migrations: list[Migration] = []
        """Migrations of this process."""
        self.decision = Decision()
        """The last decision of this process."""
        self.predicted: dict[str, float] = {}
        """Predicted imbalance of each layer's last migration, also before a resume."""
        self.sums = self.decision.sums()
        """Sums of the metrics of decisions since the last `read`."""
        self.watch(stacks)
        self._steps_of_parts = steps_of_parts(options.every)
        self._bytes_per_second: float | None = None
        """Speed of the link between ranks, measured for the first plan that is worthwhile with an infinite speed."""
        self._said: set[str] = set()
        """Kinds of lines that were printed: reasons of the guard without their numbers, and advice."""

    def watch(self, stacks: Mapping[str, ExpertStack]) -> None:
        """Plan for `stacks`, by layer, from now on."""
        self.stacks = dict(stacks)
        self._cursors = {name: stack.log.cursor() for name, stack in stacks.items()}
        self._ends: list[float] = []
        """When the steps of this window ended, for the guard."""
        for stack in stacks.values():
            stack.is_timed = self.options.guarded

    def after_step(self, step: int, optimizer: Optimizer) -> list[Migration]:
        """Plan and migrate after the `step`-th optimizer step, if a plan is due. A collective: call it on all ranks.

        Returns:
            The migrations.
        """
        if self.options.guarded:
            self._ends.append(time.perf_counter())
        if place := step % self.options.every:
            if place in self._steps_of_parts.cumsum():
                for cursor in self._cursors.values():
                    cursor.end_part()
            return []
        if not self.stacks:
            return []
        stacks = list(self.stacks.values())
        windows = self._take_windows(world_size() // stacks[0].groups.ep_size)
        imbalance = fmean(
            rank_imbalance(window.load_E, stack.placement) for window, stack in zip(windows, stacks, strict=True)
        )
        samples: list[Sample | None] = [None] * len(windows)
        if self.options.guarded:
            samples = sample_forwards(
                [stack.log for stack in stacks], max(MOST_SAMPLED // world_size(), FEWEST_SAMPLED)
            )
            self._set_cost_models(windows, samples, optimizer)
        done, refused, seconds = [], self.plans_refused, 0.0
        for (name, stack), window, sample in zip(self.stacks.items(), windows, samples, strict=True):
            guard = self.guards.get(name)
            began = time.perf_counter()
            new = plan_layer(
                self.planner,
                window,
                stack.placement,
                guard=guard,
                choices_PTK=None if sample is None else sample.choices_PTK,
            )
            seconds += time.perf_counter() - began
            if guard is not None and guard.reason:
                text = f"the guard rejects a plan for {name}: {guard.reason} (moe/plans_refused)"
                self._say(re.sub(r"[\d.e+-]+", "", guard.reason), f"step {step:,}: {text}.")
            if new is not None:
                report = migrate(stack, new, optimizer)
                done.append(Migration(step, name, new, rank_imbalance(window.load_E, new), report))
        self._advise_spare_slots(step, windows)
        self.migrations += done
        self.predicted |= {migration.layer: migration.predicted_imbalance for migration in done}
        self.decision = Decision(step, imbalance, tuple(done), self.plans_refused - refused, seconds)
        self.sums = {name: self.sums[name] + value for name, value in self.decision.sums().items()}
        return done

    def read(self) -> dict[str, float]:
        """Return the metrics of the decisions since the last call, and the predicted imbalance after a migration."""
        sums, self.sums = self.sums, Decision().sums()
        return sums | ({"moe/predicted_imbalance": fmean(self.predicted.values())} if self.predicted else {})

    @property
    def plans_refused(self) -> int:
        """Plans rejected by the guards, in this process."""
        return sum(guard.refused for guard in self.guards.values())

    def _advise_spare_slots(self, step: int, windows: list[Window]) -> None:
        """Print once what a spare slot on each rank would save the layer with the highest imbalance."""
        if "spare slots" in self._said or not is_main():
            return
        (name, stack), window = max(
            zip(self.stacks.items(), windows, strict=True),
            key=lambda layer: rank_imbalance(layer[1].load_E, layer[0][1].placement),
        )
        load_E, current = window.load_E, stack.placement
        if sum(current.slots_per_rank) > current.num_experts or rank_imbalance(load_E, current) < 1 + SPARE_SLOT_GAIN:
            return
        spare = with_spare_slots(current, 1)
        tries = (swap, current), (swap, spare), (replicate, spare)
        now, swapped, replicated = (rank_imbalance(load_E, planner(load_E, start)) for planner, start in tries)
        if now - min(swapped, replicated) >= SPARE_SLOT_GAIN:
            text = f"one spare slot per rank (spare_slots=1) would lower the imbalance of {name} from {now:.2f}"
            self._say("spare slots", f"step {step:,}: {text} to {swapped:.2f} (planner replicate: {replicated:.2f}).")

    def _say(self, kind: str, line: str) -> None:
        """Print a line on one rank, the first of its kind."""
        if kind not in self._said and is_main():
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        self._said.add(kind)

    def _take_windows(self, groups: int) -> list[Window]:
        """Return the loads of each layer since the last plan, the mean of `groups` EP groups. A collective."""
        windows = []
        for parts_SE in take_parts(list(self._cursors.values())):
            steps_S = self._steps_of_parts[-len(parts_SE) :]  # fewer after a start within a window
            windows.append(Window(parts_SE.cpu().numpy() / (groups * steps_S[:, None]), steps_S))
        return windows

    def _set_cost_models(self, windows: list[Window], samples: list[Sample | None], optimizer: Optimizer) -> None:
        """Give each layer's guard the rates that were measured. A collective."""
        device = next(iter(self.stacks.values())).device
        # A rank whose experts never had a token may have no optimizer state yet: all take the largest of any.
        kept = [float(optimizer_bytes(stack, optimizer)) for stack in self.stacks.values()]
        most_kept, _ = extremes_over_ranks(torch.tensor(kept, dtype=torch.float64, device=device))
        rates = self._seconds_per_row(windows, device)
        for (name, stack), per_row, most_bytes, sample in zip(
            self.stacks.items(), rates, most_kept.tolist(), samples, strict=True
        ):
            cost_model = CostModel(
                seconds_per_row=per_row,
                bytes_per_second=self._bytes_per_second or math.inf,
                weight_bytes=weight_bytes(stack),
                optimizer_bytes=int(most_bytes),
                row_bytes=0 if sample is None else sample.row_bytes,
            )
            guard = self.guards.setdefault(name, MigrationGuard(cost_model))
            guard.cost_model = cost_model
            guard.measure_link = self._measure_link if self._bytes_per_second is None else None

    def _measure_link(self) -> float:
        """Return the bytes per second of the slowest rank's link, measured once. A collective."""
        if self._bytes_per_second is None:
            stack = next(iter(self.stacks.values()))
            per_byte = seconds_per_byte(stack.groups.ep_group, stack.device)
            slowest, _ = extremes_over_ranks(torch.tensor([per_byte], dtype=torch.float64, device=stack.device))
            self._bytes_per_second = 1 / slowest.item() if slowest.item() else math.inf
        return self._bytes_per_second

    def _seconds_per_row(self, windows: list[Window], device: torch.device) -> list[float]:
        """Return the seconds of a row in each layer's experts, by their last forward pass on all ranks. A collective.

        The backward pass is taken to be twice as long. Compiled code is not timed: its experts are taken to be half of
        the median step, in proportion to the rows of the busiest rank.
        """
        forwards = [
            (0.0, 0) if (t := stack.timing) is None else (seconds_between(*t[:2]), t[2])
            for stack in self.stacks.values()
        ]
        gaps = [after - before for before, after in pairwise(self._ends)]
        self._ends = []
        step = median(gaps) if gaps else 0.0
        *sums, steps = sum_over_ranks(torch.tensor([*forwards, (step, 1)], dtype=torch.float64, device=device)).tolist()
        busiest = sum(
            (window.load_E @ shares(stack.placement)).max()
            for window, stack in zip(windows, self.stacks.values(), strict=True)
        )
        assumed = 0.5 * steps[0] / steps[1] / max(busiest, 1.0)
        return [3 * seconds / rows if rows else assumed for seconds, rows in sums]

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values, without the placement, which is in the checkpoint's manifest. A collective."""
        window = {name: cursor.state_dict() for name, cursor in self._cursors.items()}
        return {"every": self.options.every, "window": window, "predicted": dict(self.predicted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the window of `state_dict` on any ranks, unless windows have another length now."""
        self.predicted = dict(state.get("predicted", {}))
        for name, cursor in self._cursors.items():
            if state["every"] == self.options.every and name in state["window"]:
                cursor.load_state_dict(state["window"][name])
