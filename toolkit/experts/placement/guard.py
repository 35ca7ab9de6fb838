"""The guard: a check per layer that a plan saves more time than its migration costs, in training and in replays.

A window is the load between two plans. A plan is made for one window, and its gain changes from window to window. So
the guard computes its gain for each of the last HISTORY windows and predicts a lower bound of the mean: the mean minus
1.5 times its standard error, over the last RECENT windows (for drifting loads) or over all (for stable loads),
whichever is larger. If `review` gets the tokens' choices, the all-to-all time saved in the last window is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.loads import Floats, Load, as_floats
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.planners.registry import Planner
from toolkit.experts.placement.traffic import visits_of_choices

FEWEST_WINDOWS = 2
"""Windows that are needed to estimate how much a gain changes from one to the next."""
HISTORY, RECENT = 20, 3
PATIENCE = 2
"""Windows in a row in which a plan was worse before it is rolled back."""
MARGIN = 1.5
"""Minimum ratio of a plan's saving to its migration cost."""
LEAST = 0.005
"""A plan must save this fraction of the time of the experts: a migration adds noise of its own to a run."""


class MigrationGuard:
    """Cost check that accepts or rejects the plans of one layer.

    After each window of steps call `review`, which can return a placement to roll back to. If it returns None, ask
    `accepts` about a new plan. The caller must apply either decision.
    """

    def __init__(self, cost_model: CostModel):
        self.cost_model = cost_model
        self.refused = 0
        """Plans that `accepts` has rejected, in this process."""
        self.reason = ""
        """Reason of the last rejection."""
        self._windows: list[Floats] = []
        self._choices_PTK: NDArray[Any] | None = None
        self._replaced: list[tuple[ExpertPlacement, list[float]]] = []
        """Earlier placements, latest last, with the seconds per step that each would have saved in the last windows."""

    def review(
        self, load_E: NDArray[Any], current: ExpertPlacement, *, steps: int, choices_PTK: NDArray[Any] | None = None
    ) -> ExpertPlacement | None:
        """Record a window.

        Args:
            load_E: Its mean number of pairs per expert and step, over all ranks.
            current: The placement now.
            steps: The steps until the next plan.
            choices_PTK: The experts of some tokens of each rank, negative for none.

        Returns:
            The placement to roll back to: one of the last PATIENCE that were replaced, if it would have been better
            than `current` in each of the last PATIENCE windows and saves enough within `steps`. Else None.
        """
        load = np.asarray(load_E, dtype=np.float64)
        self._windows = [*self._windows, load][-HISTORY:]
        self._choices_PTK = choices_PTK
        for former, savings in self._replaced:
            saved = self._gain(load, current, former) + self._exchange_gain(current, former)
            savings[:] = [*savings, saved][-PATIENCE:]
        better = [
            (min(savings), former)
            for former, savings in self._replaced
            if len(savings) == PATIENCE and self._pays(min(savings), current, former, steps)
        ]
        if not better:
            return None
        self._replaced = []
        return max(better, key=lambda pair: pair[0])[1]

    def accepts(self, current: ExpertPlacement, plan: ExpertPlacement, *, steps: int) -> bool:
        """Return whether `plan` saves more than its migration costs within `steps`, the steps until the next plan."""
        if plan == current:
            return False
        promise = self.promise(current, plan)
        least = LEAST * max(
            (self.cost_model.step_seconds(load, current) for load in self._windows[-RECENT:]), default=0.0
        )
        if promise < least or not self._pays(promise, current, plan, steps):
            self.refused += 1
            self.reason = self._explain(promise, least, steps, self.cost_model.migration_seconds(current, plan))
            return False
        formers = [*(former for former, _ in self._replaced), current][-PATIENCE:]
        self._replaced = [(former, []) for former in formers]
        return True

    def promise(self, current: ExpertPlacement, plan: ExpertPlacement) -> float:
        """Return the predicted gain of `plan`, in seconds per step; 0 while there are fewer than FEWEST_WINDOWS."""
        if len(self._windows) < FEWEST_WINDOWS:
            return 0.0
        gains = np.array([self._gain(load, current, plan) for load in self._windows])
        return max(_lower_bound(gains[-RECENT:]), _lower_bound(gains)) + self._exchange_gain(current, plan)

    def _gain(self, load_E: Floats, current: ExpertPlacement, plan: ExpertPlacement) -> float:
        """Return the seconds per step that `plan` saves its experts under `load_E`."""
        return self.cost_model.step_seconds(load_E, current) - self.cost_model.step_seconds(load_E, plan)

    def _exchange_gain(self, current: ExpertPlacement, plan: ExpertPlacement) -> float:
        """Return the seconds per step that `plan` saves the exchange of rows in the last window; 0 without choices."""
        if self._choices_PTK is None:
            return 0.0
        told = max(1, int((self._choices_PTK >= 0).sum()))
        visits = np.stack([visits_of_choices(self._choices_PTK, placement) for placement in (current, plan)])
        seconds = self.cost_model.seconds_of_visits(visits * (self._windows[-1].sum() / told))
        return float(seconds[0] - seconds[1])

    def _pays(self, gain: float, current: ExpertPlacement, plan: ExpertPlacement, steps: int) -> bool:
        return gain * steps > MARGIN * self.cost_model.migration_seconds(current, plan)

    def _explain(self, promise: float, least: float, steps: int, migration: float) -> str:
        if len(self._windows) < FEWEST_WINDOWS:
            return f"a gain is judged by {FEWEST_WINDOWS} windows of loads or more"
        if promise <= 0:
            return "its gain cannot be told from how the loads change between windows"
        if promise < least:
            return f"it saves less than {LEAST:.2%} of the time of the experts"
        return (
            f"until the next plan it saves {1e3 * promise * steps:.3g} ms, which is less than {MARGIN:g} times "
            f"the {1e3 * migration:.3g} ms of the migration"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "windows": [load.tolist() for load in self._windows],
            "replaced": [[former.to_dict(), list(savings)] for former, savings in self._replaced],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._windows = [np.array(load) for load in state["windows"]]
        self._replaced = [(ExpertPlacement.from_dict(former), list(savings)) for former, savings in state["replaced"]]


def _lower_bound(gains: Floats) -> float:
    """Return the mean of two gains or more, less 1.5 times its standard error."""
    return float(gains.mean() - 1.5 * gains.std(ddof=1) / np.sqrt(len(gains)))


def plan_layer(
    planner: Planner,
    load_E: Load,
    current: ExpertPlacement,
    *,
    guard: MigrationGuard | None = None,
    steps: int,
    choices_PTK: NDArray[Any] | None = None,
) -> ExpertPlacement | None:
    """Plan one layer for the next window, which is assumed to be as long as the last one.

    A pure function of its arguments and of the guard's state: ranks with equal arguments get equal results.

    Args:
        planner: The planner.
        load_E: The mean number of pairs per expert and step over the ranks of one EP group, in the last window.
        current: The placement now.
        guard: Checks that a plan is worth its migration. None: every plan is applied.
        steps: The steps of a window.
        choices_PTK: The experts of some tokens of each rank, by which the guard counts the ranks that a token visits.

    Returns:
        The planner's placement, an earlier one that the guard rolls back to, or None to keep `current`. The caller must
        apply it.
    """
    load = as_floats(load_E)
    former = guard.review(load, current, steps=steps, choices_PTK=choices_PTK) if guard else None
    if former is not None:
        return former
    plan = planner(load, current)
    accepted = guard.accepts(current, plan, steps=steps) if guard else plan != current
    return plan if accepted else None
