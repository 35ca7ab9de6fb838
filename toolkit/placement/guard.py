"""Whether a plan is worth its bytes, and whether it kept its promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.placement.imbalance import shares
from toolkit.placement.placement import ExpertPlacement
from toolkit.placement.traffic import migration_cost

FEWEST_WINDOWS = 3
"""To tell how much a gain changes from one to the next."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
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
    the return that it may order; else ask `accepts` about a new plan, and carry it out if so.

    A plan is made for the load of one window, and what it gains changes from window to window. So it is tried on the
    last `history` windows, and counts for the better of two promises. What it would have gained in the worst of the
    last `recent` windows, less the change that is usual between one window and the next (root mean square): a gain
    that can be told from noise. Or, once there are `recent` windows, what it would have gained in the worst of all:
    the loads may wander, the plan serves all the places where they were.

    A change must save `margin` times what it costs. It is taken back where it was worse in `patience` windows running.
    """

    def __init__(
        self, cost_model: CostModel, *, history: int = 20, recent: int = 6, patience: int = 2, margin: float = 1.5
    ):
        self.cost_model, self.history, self.recent, self.patience, self.margin = (
            cost_model,
            history,
            recent,
            patience,
            margin,
        )
        self.refused = 0
        """Plans that `accepts` has refused, in this process."""
        self.reason = ""
        """Why it refused the last one."""
        self._windows: list[NDArray[np.float64]] = []
        self._replaced: list[tuple[ExpertPlacement, list[float]]] = []
        """Former placements, latest last, with what each would have saved in the last windows."""

    def review(self, load_E: NDArray[Any], current: ExpertPlacement, *, steps: int) -> ExpertPlacement | None:
        """Take note of a window, of which `load_E` is the mean number of rows per expert and step, over all ranks.

        Returns the placement to go back to, where one of the last `patience` that were replaced would have been better
        than `current` in each of the last `patience` windows, and the return pays within `steps`; else None.
        """
        load = np.asarray(load_E, dtype=np.float64)
        self._windows = [*self._windows, load][-self.history :]
        for former, savings in self._replaced:
            savings[:] = [*savings, self._gain(load, current, former)][-self.patience :]
        better = [
            (min(savings), former)
            for former, savings in self._replaced
            if len(savings) == self.patience and self._pays(min(savings), current, former, steps)
        ]
        if not better:
            return None
        self._replaced = []
        return max(better, key=lambda pair: pair[0])[1]

    def accepts(self, current: ExpertPlacement, plan: ExpertPlacement, *, steps: int) -> bool:
        """Whether `plan` pays for its migration within `steps`, the steps until the next plan. An accepted plan is
        taken for carried out; of a refused one, `refused` and `reason` take note."""
        if plan == current:
            return False
        promise = self.promise(current, plan)
        if not self._pays(promise, current, plan, steps):
            self.refused += 1
            self.reason = self._explain(promise * steps, self.cost_model.migration_seconds(current, plan))
            return False
        formers = [*(former for former, _ in self._replaced), current][-self.patience :]
        self._replaced = [(former, []) for former in formers]
        return True

    def promise(self, current: ExpertPlacement, plan: ExpertPlacement) -> float:
        """Seconds per step that `plan` can be relied on to save; 0 while there are too few windows to tell."""
        if len(self._windows) < FEWEST_WINDOWS:
            return 0.0
        gains = np.array([self._gain(load, current, plan) for load in self._windows])
        usual_change = float(np.sqrt(np.square(np.diff(gains)).mean()))
        above_noise = float(gains[-self.recent :].min()) - usual_change
        return above_noise if len(gains) < self.recent else max(above_noise, float(gains.min()))

    def _gain(self, load_E: NDArray[np.float64], current: ExpertPlacement, plan: ExpertPlacement) -> float:
        """Seconds per step."""
        return self.cost_model.step_seconds(load_E, current) - self.cost_model.step_seconds(load_E, plan)

    def _pays(self, gain: float, current: ExpertPlacement, plan: ExpertPlacement, steps: int) -> bool:
        return gain * steps > self.margin * self.cost_model.migration_seconds(current, plan)

    def _explain(self, saved: float, migration: float) -> str:
        if len(self._windows) < FEWEST_WINDOWS:
            return f"a gain is judged by {FEWEST_WINDOWS} windows of loads or more"
        if saved <= 0:
            return "its gain cannot be told from how the loads change between windows"
        return (
            f"until the next plan it saves {1e3 * saved:.3g} ms, which is less than {self.margin:g} times "
            f"the {1e3 * migration:.3g} ms of the migration"
        )

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {
            "windows": [load.tolist() for load in self._windows],
            "replaced": [[former.to_dict(), list(savings)] for former, savings in self._replaced],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._windows = [np.array(load) for load in state["windows"]]
        self._replaced = [(ExpertPlacement.from_dict(former), list(savings)) for former, savings in state["replaced"]]
