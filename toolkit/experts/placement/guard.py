"""The guard: a check per layer that a plan saves more time than its migration costs, in training and in replays.

A plan is made from the loads of a window of steps, and used in the next ones. The guard predicts its gain inside the
window: it makes a plan from the earlier half of it, and computes what that would have saved in each part of the later
half. The prediction is the mean minus `ERRORS` standard errors, so it is small for loads that vary from step to step or
drift away.

Loads can also change between windows. So the guard compares each prediction with what the plan saves in the next
window, or would have saved if it was rejected. If the last plans saved less than half of what was predicted, the next
prediction is scaled. The more windows in a row confirmed their predictions, the more windows a plan has to save its
migration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import require_type
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.loads import Floats, Window
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
MOST_WINDOWS = 8
"""The most windows in which a plan may save its migration."""
OUTCOMES = 4
"""Predictions that are compared with what came true before the next one."""
CONFIRMED = 0.5
"""Least share of a prediction that has to come true."""


@dataclass
class MigrationGuard:
    """Cost check that accepts or rejects the plans of one layer. Its history starts again with each process."""

    cost_model: CostModel
    measure_link: Callable[[], float] | None = None
    """Returns the bytes per second of the link. Called for the first plan that is worthwhile with the rate of
    `cost_model`, which is infinite until then. None: the rate is measured."""
    refused: int = 0
    """Plans that `accepts` has rejected, in this process."""
    reason: str = ""
    """Reason to reject the last plan, empty if it was accepted."""
    outcomes: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=OUTCOMES))
    """Shares of the experts' time that the last plans saved in the next window, or would have saved, and predictions.
    """
    confirmed: int = 0
    """The last windows in a row that confirmed their prediction, since the last migration."""
    _predicted: tuple[ExpertPlacement, ExpertPlacement, float] | None = None
    """Placement and plan of the last window, and the share of the experts' time that the plan should save."""

    def accepts(
        self,
        plan: ExpertPlacement,
        current: ExpertPlacement,
        window: Window,
        planner: Planner,
        choices_PTK: NDArray[Any] | None = None,
    ) -> bool:
        """Return whether `plan` saves more than its migration costs in the next window, or in as many as the last ones
        that confirmed their predictions. Windows are assumed to be as long as this one.

        Args:
            plan: The placement that `planner` returned for the window.
            current: The placement now.
            window: The loads since the last plan, summed over all ranks.
            planner: The planner, which is tried on the earlier half of the window.
            choices_PTK: The experts of some tokens of each rank, shape (P, T, K), negative for none. With it, the
                all-to-all time that the plan saves is part of its gain.
        """
        self._compare_with_prediction(window)
        self.reason = "" if plan == current else self._objection(plan, current, window, planner, choices_PTK)
        if plan != current and not self.reason and self.measure_link is not None:
            self.cost_model = replace(self.cost_model, bytes_per_second=self.measure_link())
            self.reason = self._objection(plan, current, window, planner, choices_PTK)
        self.refused += bool(self.reason)
        accepted = plan != current and not self.reason
        if accepted:
            self.confirmed = 0
        return accepted

    def _compare_with_prediction(self, window: Window) -> None:
        """Note what the last plan saved in `window`, or would have saved."""
        predicted, self._predicted = self._predicted, None
        if predicted is None or predicted[0].num_experts != len(window.load_E):
            self.confirmed = 0
        else:
            before, plan, share = predicted
            seconds = self.cost_model.step_seconds(window.load_E, before)
            saved = float(self._gains(before, plan, window).mean()) / seconds if seconds else 0.0
            self.outcomes.append((saved, share))
            self.confirmed = self.confirmed + 1 if saved >= CONFIRMED * share else 0

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
        seconds = self.cost_model.step_seconds(window.load_E, current)
        if gain >= LEAST * seconds > 0:
            self._predicted = current, plan, gain / seconds
        if self.outcomes:
            saved, predicted = (sum(shares) for shares in zip(*self.outcomes, strict=True))
            if saved < CONFIRMED * predicted:
                gain *= max(saved / predicted, 0.0)
        if choices_PTK is not None:
            gain += self._exchange_gain(current, plan, float(window.load_SE[-1].sum()), choices_PTK)
        if gain <= 0:
            return "its gain cannot be told from how the loads change"
        if gain < LEAST * seconds:
            return f"it saves less than {LEAST:.2%} of the time of the experts"
        steps = min(max(self.confirmed, 1), MOST_WINDOWS) * window.steps
        saved, migration = gain * steps, self.cost_model.migration_seconds(current, plan)
        if saved <= MARGIN * migration:
            return (
                f"in {steps:,} steps it saves {1e3 * saved:.3g} ms, which is less than {MARGIN:g} times "
                f"the {1e3 * migration:.3g} ms of the migration"
            )
        return ""

    def predicted_gain(self, current: ExpertPlacement, window: Window, planner: Planner) -> float:
        """Return a lower bound of the seconds per step that plans save: `planner` plans for the earlier half of the
        window, and its plan is compared with `current` in each part of the later half."""
        earlier, later = window.halves()
        gains = self._gains(current, planner(earlier.load_E, current), later)
        return float(gains.mean() - ERRORS * gains.std(ddof=1) / np.sqrt(len(gains)))

    def _gains(self, current: ExpertPlacement, plan: ExpertPlacement, window: Window) -> Floats:
        """Return (S,), the seconds per step that `plan` saves in each part of `window`."""
        seconds = [
            [self.cost_model.step_seconds(load_E, each) for each in (current, plan)] for load_E in window.load_SE
        ]
        return -np.diff(seconds)[:, 0]

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
