"""Detects that the model no longer covers the data: a reason to grow.

The signal is the fraction of coming samples, not yet trained on, whose target has a predicted probability below 0.5.
It is 0 for a model that has learned the data and 1 for one that has not, whatever the router's own confidence.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from toolkit.train.callbacks.drift import CumulativeSum

HALF_PROBABILITY = 0.6931471805599453
"""-ln 0.5: a sample with a higher loss, in nats, is not covered."""

Lack = Literal["shift", "plateau", "schedule"]
"""Why experts are split; the last one is no alarm, but `LifecycleOptions.grow_every`."""


class CoverageAlarm:
    """Tells a lack of coverage from noise; `observe` takes one reading after another.

    shift     a `CumulativeSum` detects that the mean has risen
    plateau   its running mean stays above `tolerated` and has found no lower level for `patience` readings

    After an alarm the running mean starts again, after `cooldown` readings that are ignored.
    """

    def __init__(self, *, tolerated: float = 0.1, patience: int = 40, cooldown: int = 8):
        self.tolerated, self.patience, self.cooldown = tolerated, patience, cooldown
        # A reading averages many samples, so a single one may raise the alarm, and a model that learns fast lowers the
        # mean at once.
        self.shift = CumulativeSum(threshold=6.0, slack=1.0, memory=10, warmup=1, largest=None, largest_drop=math.inf)
        self.lowest = 1.0
        """Of the running mean since the last alarm."""
        self.since_lowest = 0
        """Readings since then."""
        self.resting = 0
        """Readings yet to be ignored."""

    def observe(self, uncovered: float, samples: int) -> Lack | None:
        """The alarm that the reading `uncovered`, a fraction of `samples`, raises, if any."""
        if self.resting:
            self.resting -= 1
            return None
        mean = self.shift.mean
        # The variance of a fraction of so many samples, however steady the readings were.
        binomial = max(mean * (1 - mean), 0.5 / samples) / samples
        if self.shift.add(uncovered, least_variance=binomial):
            return self._alarm("shift")
        self.since_lowest += 1
        if self.shift.mean < 0.95 * self.lowest:
            self.lowest, self.since_lowest = self.shift.mean, 0
        if self.shift.mean > self.tolerated and self.since_lowest >= self.patience:
            return self._alarm("plateau")
        return None

    def _alarm(self, kind: Lack) -> Lack:
        self.shift.reset()
        self.lowest, self.since_lowest, self.resting = 1.0, 0, self.cooldown
        return kind

    def state_dict(self) -> dict[str, Any]:
        counters = {"lowest": self.lowest, "since_lowest": self.since_lowest, "resting": self.resting}
        return counters | {"shift": self.shift.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lowest, self.since_lowest, self.resting = (state[k] for k in ("lowest", "since_lowest", "resting"))
        self.shift.load_state_dict(state["shift"])
