"""The guard: a check per layer that a plan saves more time than its migration costs, in training and in replays.

A plan is made from the loads of a window of steps, and used in the next one. The guard predicts its gain inside the
window: it makes a plan from the earlier half of it, and computes what that would have saved in each part of the later
half. The prediction is the mean minus `ERRORS` standard errors, so it is small for loads that vary from step to step or
drift away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import require_type
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.loads import Window
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.planners.registry import Planner
from toolkit.experts.placement.traffic import visits_of_choices

FEWEST_PARTS = 4
"""Two in each half, the fewest that have a spread."""
ERRORS = 2.0
"""Standard errors by which the mean gain is lowered."""
MARGIN = 1.5
"""Minimum ratio of a plan's saving to its migration cost."""
LEAST = 0.005
"""A plan must save this fraction of the time of the experts: a migration adds noise of its own to a run."""


@dataclass
class MigrationGuard:
    """Cost check that accepts or rejects the plans of one layer."""

    cost_model: CostModel
    refused: int = 0
    """Plans that `accepts` has rejected, in this process."""
    reason: str = ""
    """Reason to reject the last plan, empty if it was accepted."""

    def accepts(
        self,
        plan: ExpertPlacement,
        current: ExpertPlacement,
        window: Window,
        planner: Planner,
        choices_PTK: NDArray[Any] | None = None,
    ) -> bool:
        """Return whether `plan` saves more than its migration costs in a window as long as this one.

        Args:
            plan: The placement that `planner` returned for the window.
            current: The placement now.
            window: The loads since the last plan, summed over all ranks.
            planner: The planner, which is tried on the earlier half of the window.
            choices_PTK: The experts of some tokens of each rank, shape (P, T, K), negative for none. With it, the
                all-to-all time that the plan saves is part of its gain.
        """
        self.reason = "" if plan == current else self._objection(plan, current, window, planner, choices_PTK)
        self.refused += bool(self.reason)
        return plan != current and not self.reason

    def _objection(
        self,
        plan: ExpertPlacement,
        current: ExpertPlacement,
        window: Window,
        planner: Planner,
        choices_PTK: NDArray[Any] | None,
    ) -> str:
        """Return why the plan is not worth its migration, or nothing."""
        if len(window.steps_S) < FEWEST_PARTS:
            return f"a window of fewer than {FEWEST_PARTS} steps does not show how loads change"
        gain = self.predicted_gain(current, window, planner)
        if choices_PTK is not None:
            gain += self._exchange_gain(current, plan, float(window.load_SE[-1].sum()), choices_PTK)
        if gain <= 0:
            return "its gain cannot be told from how the loads change within a window"
        if gain < LEAST * self.cost_model.step_seconds(window.load_E, current):
            return f"it saves less than {LEAST:.2%} of the time of the experts"
        saved, migration = gain * window.steps, self.cost_model.migration_seconds(current, plan)
        if saved <= MARGIN * migration:
            return (
                f"until the next plan it saves {1e3 * saved:.3g} ms, which is less than {MARGIN:g} times "
                f"the {1e3 * migration:.3g} ms of the migration"
            )
        return ""

    def predicted_gain(self, current: ExpertPlacement, window: Window, planner: Planner) -> float:
        """Return a lower bound of the seconds per step that plans save: `planner` plans for the earlier half of the
        window, and its plan is compared with `current` in each part of the later half."""
        earlier, later = window.halves()
        plan = planner(earlier.load_E, current)
        seconds = [[self.cost_model.step_seconds(load_E, each) for each in (current, plan)] for load_E in later.load_SE]
        gains = -np.diff(seconds)
        return float(gains.mean() - ERRORS * gains.std(ddof=1) / np.sqrt(len(gains)))

    def _exchange_gain(
        self, current: ExpertPlacement, plan: ExpertPlacement, pairs: float, choices_PTK: NDArray[Any]
    ) -> float:
        """Return the seconds per step of `pairs` pairs that `plan` saves the exchange of rows."""
        told = max(1, int((choices_PTK >= 0).sum()))
        visits = np.stack([visits_of_choices(choices_PTK, placement) for placement in (current, plan)])
        seconds = self.cost_model.seconds_of_visits(visits * (pairs / told))
        return float(seconds[0] - seconds[1])


def plan_layer(
    planner: Planner,
    window: Window,
    current: ExpertPlacement,
    *,
    guard: MigrationGuard | None = None,
    choices_PTK: NDArray[Any] | None = None,
) -> ExpertPlacement | None:
    """Plan one layer for the next window, which is assumed to be as long as the last one.

    A pure function of its arguments: ranks with equal arguments get equal results.

    Args:
        planner: The planner. With a guard it is called twice.
        window: The loads since the last plan, of one EP group in the mean.
        current: The placement now.
        guard: Checks that a plan is worth its migration. None: every plan is applied.
        choices_PTK: The experts of some tokens of each rank, by which the guard counts the ranks that a token visits.

    Returns:
        The planner's placement, or None to keep `current`. The caller must apply it.
    """
    plan = planner(window.load_E, current)
    require_type("planner(load_E, current)", plan, ExpertPlacement, "Return `current` to keep the placement")
    accepted = plan != current if guard is None else guard.accepts(plan, current, window, planner, choices_PTK)
    return plan if accepted else None
