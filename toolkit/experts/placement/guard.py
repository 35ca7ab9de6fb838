"""Plans one layer after a window of steps, in training and in replays.

A guard decides whether a plan gains more than its migration costs, and returns to an earlier placement where it did
not.
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


class MigrationGuard:
    """Accepts or refuses the plans of one layer. After each window of steps call `review`, which may return a placement
    to roll back to. If it returns None, ask `accepts` about a new plan. The caller must apply what either decides.

    A plan is made for the load of one window, and its gain changes from window to window. So its gain is computed for
    each of the last `history` windows, and predicted as a lower bound of the mean: the mean less 1.5 times its
    standard error, of the last `recent` windows (loads that drift) or of all (loads that do not), whichever is larger.
    What a plan saves of the exchange of rows is added, where `review` is told tokens' choices: that of the last window.

    Args:
        cost_model: Says what a placement and a migration cost.
        history: The windows whose loads are kept.
        recent: See above.
        patience: A plan is rolled back where it was worse in so many windows in a row.
        margin: A plan must save so many times what it costs.
        least: A plan must save this part of the time of the experts, however little it costs.
    """

    def __init__(
        self,
        cost_model: CostModel,
        *,
        history: int = 20,
        recent: int = 3,
        patience: int = 2,
        margin: float = 1.5,
        least: float = 0.005,
    ):
        self.cost_model = cost_model
        self.history, self.recent, self.patience, self.margin = history, recent, patience, margin
        self.least = least
        self.refused = 0
        """Plans that `accepts` has refused, in this process."""
        self.reason = ""
        """Why it refused the last one."""
        self._windows: list[NDArray[np.float64]] = []
        self._choices_STK: NDArray[Any] | None = None
        self._replaced: list[tuple[ExpertPlacement, list[float]]] = []
        """Earlier placements, latest last, with the seconds per step that each would have saved in the last windows."""

    def review(
        self,
        load_E: NDArray[Any],
        current: ExpertPlacement,
        *,
        steps: int,
        choices_STK: NDArray[Any] | None = None,
    ) -> ExpertPlacement | None:
        """Records a window; `load_E`: its mean number of assignments per expert and step, over all ranks;
        `choices_STK`: the experts of some tokens of each rank, negative where there is none.

        Returns the placement to roll back to: one of the last `patience` that were replaced, if it would have been
        better than `current` in each of the last `patience` windows and the migration pays within `steps`; else None.
        """
        load = np.asarray(load_E, dtype=np.float64)
        self._windows = [*self._windows, load][-self.history :]
        self._choices_STK = choices_STK
        for former, savings in self._replaced:
            saved = self._gain(load, current, former) + self._exchange_gain(current, former)
            savings[:] = [*savings, saved][-self.patience :]
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
        """Returns whether `plan` saves more than its migration costs within `steps`, the steps until the next plan. The
        caller must apply an accepted plan; of a refused one, `refused` counts and `reason` says why."""
        if plan == current:
            return False
        promise = self.promise(current, plan)
        least = self._least_gain(current)
        if promise < least or not self._pays(promise, current, plan, steps):
            self.refused += 1
            self.reason = self._explain(promise, least, steps, self.cost_model.migration_seconds(current, plan))
            return False
        formers = [*(former for former, _ in self._replaced), current][-self.patience :]
        self._replaced = [(former, []) for former in formers]
        return True

    def promise(self, current: ExpertPlacement, plan: ExpertPlacement) -> float:
        """Returns the predicted gain of `plan`, in seconds per step; 0 while there are fewer than FEWEST_WINDOWS."""
        if len(self._windows) < FEWEST_WINDOWS:
            return 0.0
        gains = np.array([self._gain(load, current, plan) for load in self._windows])
        return max(_lower_bound(gains[-self.recent :]), _lower_bound(gains)) + self._exchange_gain(current, plan)

    def _gain(self, load_E: NDArray[np.float64], current: ExpertPlacement, plan: ExpertPlacement) -> float:
        """Returns the seconds per step that `plan` saves its experts under `load_E`."""
        return self.cost_model.step_seconds(load_E, current) - self.cost_model.step_seconds(load_E, plan)

    def _exchange_gain(self, current: ExpertPlacement, plan: ExpertPlacement) -> float:
        """Returns the seconds per step that `plan` saves the exchange of rows in the last window; 0 where nobody told
        choices."""
        if self._choices_STK is None:
            return 0.0
        told = max(1, int((self._choices_STK >= 0).sum()))
        before, after = (visits_of_choices(self._choices_STK, placement) for placement in (current, plan))
        seconds = self.cost_model.seconds_of_visits(np.stack([before, after]) * (self._windows[-1].sum() / told))
        return float(seconds[0] - seconds[1])

    def _least_gain(self, current: ExpertPlacement) -> float:
        """Returns the seconds per step that are not worth a migration, which adds its own noise to a run."""
        recent = [self.cost_model.step_seconds(load, current) for load in self._windows[-self.recent :]]
        return self.least * max(recent, default=0.0)

    def _pays(self, gain: float, current: ExpertPlacement, plan: ExpertPlacement, steps: int) -> bool:
        return gain * steps > self.margin * self.cost_model.migration_seconds(current, plan)

    def _explain(self, promise: float, least: float, steps: int, migration: float) -> str:
        if len(self._windows) < FEWEST_WINDOWS:
            return f"a gain is judged by {FEWEST_WINDOWS} windows of loads or more"
        if promise <= 0:
            return "its gain cannot be told from how the loads change between windows"
        if promise < least:
            return f"it saves less than {self.least:.2%} of the time of the experts"
        return (
            f"until the next plan it saves {1e3 * promise * steps:.3g} ms, which is less than {self.margin:g} times "
            f"the {1e3 * migration:.3g} ms of the migration"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold."""
        return {
            "windows": [load.tolist() for load in self._windows],
            "replaced": [[former.to_dict(), list(savings)] for former, savings in self._replaced],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._windows = [np.array(load) for load in state["windows"]]
        self._replaced = [(ExpertPlacement.from_dict(former), list(savings)) for former, savings in state["replaced"]]


def _lower_bound(gains: Floats) -> float:
    """Returns the mean of two gains or more, less 1.5 times its standard error."""
    return float(gains.mean() - 1.5 * gains.std(ddof=1) / np.sqrt(len(gains)))


def plan_layer(
    planner: Planner,
    load_E: Load,
    current: ExpertPlacement,
    *,
    guard: MigrationGuard | None = None,
    steps: int,
    choices_STK: NDArray[Any] | None = None,
) -> ExpertPlacement | None:
    """Plans one layer for the next window, which is assumed to be as long as the last one.

    A pure function of its arguments and of the guard's state: ranks with equal arguments get equal results.

    Args:
        planner: The planner.
        load_E: The mean number of assignments per expert and step over the ranks of one EP group, in the last window.
        current: The placement now.
        guard: Decides whether a plan is worth its migration; None: every plan is.
        steps: The steps of a window.
        choices_STK: The experts of some tokens of each rank, which tell the guard how many ranks a token visits.

    Returns:
        The planner's placement, an earlier one that the guard returns to, or None to keep `current`. The caller must
        apply it, because the guard counts on it.
    """
    load = as_floats(load_E)
    former = guard.review(load, current, steps=steps, choices_STK=choices_STK) if guard else None
    if former is not None:
        return former
    plan = planner(load, current)
    accepted = guard.accepts(current, plan, steps=steps) if guard else plan != current
    return plan if accepted else None
