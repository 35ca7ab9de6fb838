"""Whether a plan is worth its bytes, and whether it kept its promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.moe.imbalance import shares
from toolkit.moe.placement import ExpertPlacement
from toolkit.moe.traffic import migration_cost

MORE = 1 + 1e-9
"""Differences below this factor are rounding."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What time costs what. Ranks compute at once and send at once, so the busiest one counts."""

    seconds_per_row: float
    """Compute of one routed copy, forward and backward, on one rank."""
    bytes_per_second: float
    """Of one rank's link, each way."""
    weight_bytes: int
    """Of one copy of an expert."""
    optimizer_bytes: int = 0
    """Of one expert, at its owner."""
    seconds_per_migration: float = 0.0
    """What a change of placement costs besides its bytes: planning, agreeing, waiting."""

    def step_seconds(self, load_E: NDArray[Any], placement: ExpertPlacement) -> float:
        """Of the busiest rank in a step with that many rows per expert."""
        return float((load_E @ shares(placement)).max()) * self.seconds_per_row

    def migration_seconds(self, old: ExpertPlacement, new: ExpertPlacement) -> float:
        """0 where nothing is to be done."""
        if old == new:
            return 0.0
        cost = migration_cost(old, new, weight_bytes=self.weight_bytes, optimizer_bytes=self.optimizer_bytes)
        return cost.busiest_rank_bytes / self.bytes_per_second + self.seconds_per_migration


class MigrationGuard:
    """Stands between a planner and the experts of one layer. After each window of steps call `review`, and carry out
    the return that it may order; then ask `accepts` about a new plan, and carry it out if so.

    A window's load is the mean number of rows per expert and step (E), over all ranks of the shard group.
    """

    def __init__(self, prices: Prices, *, patience: int = 2, remember: int = 2, margin: float = 1.0):
        self.prices, self.patience, self.remember, self.margin = prices, patience, remember, margin
        self._windows: list[NDArray[np.float64]] = []
        self._replaced: list[tuple[ExpertPlacement, int]] = []
        """Former placements, latest last, each with the windows in a row in which it would have been better."""

    def review(self, load_E: NDArray[Any], current: ExpertPlacement) -> ExpertPlacement | None:
        """Take note of a window. The placement to go back to, where one of the last `remember` that were replaced would
        have been better than `current` in each of the last `patience` windows; else None."""
        load = np.asarray(load_E, dtype=np.float64)
        self._windows = [*self._windows, load][-self.patience :]
        now = self.prices.step_seconds(load, current)
        judged = []
        for former, windows in self._replaced:
            would_be = self.prices.step_seconds(load, former)
            judged.append((would_be, former, windows + 1 if would_be * MORE < now else 0))
        self._replaced = [(former, windows) for _, former, windows in judged]
        better = [(would_be, former) for would_be, former, windows in judged if windows >= self.patience]
        if not better:
            return None
        self._replaced = []
        return min(better, key=lambda pair: pair[0])[1]

    def accepts(self, current: ExpertPlacement, plan: ExpertPlacement, *, steps: int) -> bool:
        """Whether `plan` pays for its migration within `steps`, the steps until the next plan.

        The gain per step is the least that it would have gained in the last `patience` windows: what helps against the
        latest window alone is a plan for the past. An accepted plan is taken for carried out.
        """
        gain = self.gain_seconds(current, plan) * steps
        if plan == current or gain <= self.margin * self.prices.migration_seconds(current, plan):
            return False
        self._replaced = [*self._replaced, (current, 0)][-self.remember :]
        return True

    def gain_seconds(self, current: ExpertPlacement, plan: ExpertPlacement) -> float:
        """Predicted gain per step; 0 before the first window."""
        step = self.prices.step_seconds
        return min((step(load, current) - step(load, plan) for load in self._windows), default=0.0)

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {
            "windows": [load.tolist() for load in self._windows],
            "replaced": [[former.to_dict(), windows] for former, windows in self._replaced],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._windows = [np.array(load) for load in state["windows"]]
        self._replaced = [(ExpertPlacement.from_dict(former), windows) for former, windows in state["replaced"]]
