"""Detects that the model no longer covers the data: a reason to grow.

The signal is the fraction of coming samples, not yet trained on, whose target has a predicted probability below 0.5.
It is 0 for a model that has learned the data and 1 for one that has not, whatever the router's own confidence.
"""

from __future__ import annotations

import math
from typing import Any, Literal

HALF_PROBABILITY = 0.6931471805599453
"""-ln 0.5: a sample with a higher loss, in nats, is not covered."""
LARGEST_UPDATE = 2.0
"""Largest rise of a value above the running mean that updates the mean, in standard deviations. Larger updates would
turn a change into the new mean before it is detected."""

Lack = Literal["shift", "plateau", "schedule"]
"""Why experts are split; "schedule" is no alarm: `grow_every` steps have passed."""


THRESHOLD, SLACK = 6.0, 1.0
"""In standard deviations. A reading averages many samples, so a single one may raise an alarm."""
MEMORY = 10
"""Readings over which mean and variance are taken."""


class CumulativeSum:
    """One-sided CUSUM (Page 1954, Biometrika 41, 100-115) for a rise of the mean of a series.

        g_t = max(0, g_{t-1} + z_t - SLACK),   alarm when g_t > THRESHOLD

    where z_t is the value's distance from an exponential moving mean, in exponential moving standard deviations. After
    an alarm both are estimated from scratch.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all values, as after an alarm."""
        self.seen, self.mean, self.variance, self.sum = 0, 0.0, 0.0, 0.0

    def add(self, value: float, *, least_variance: float) -> bool:
        """Return whether the mean has risen, with this value. The variance counts as `least_variance` or more."""
        if self.seen:
            scale = math.sqrt(max(self.variance, least_variance))
            self.sum = max(0.0, self.sum + (value - self.mean) / scale - SLACK)
            if self.sum > THRESHOLD:
                self.reset()
                return True
            value = min(value, self.mean + LARGEST_UPDATE * scale)
        # A plain mean at first, then an exponential one; the variance after West 1979 (CACM 22, 9).
        kept = min(1 - 1 / MEMORY, self.seen / (self.seen + 1))
        difference = value - self.mean
        self.mean += (1 - kept) * difference
        self.variance = kept * (self.variance + (1 - kept) * difference * difference)
        self.seen += 1
        return False


class CoverageAlarm:
    """Tells a lack of coverage from noise; `observe` takes one reading after another.

    shift     a `CumulativeSum` detects that the mean has risen
    plateau   its running mean stays above `tolerated` and has found no lower level for `patience` readings

    After an alarm the running mean starts again, after `cooldown` readings that are ignored.
    """

    def __init__(self, *, tolerated: float = 0.1, patience: int = 40, cooldown: int = 8):
        self.tolerated, self.patience, self.cooldown = tolerated, patience, cooldown
        self.shift = CumulativeSum()
        self.lowest = 1.0
        """The lowest running mean since the last alarm."""
        self.since_lowest = 0
        """Readings since then."""
        self.resting = 0
        """Readings yet to be ignored."""

    def observe(self, uncovered: float, samples: int) -> Lack | None:
        """Returns the alarm that the reading `uncovered`, a fraction of `samples`, raises, if any."""
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
        return {
            "lowest": self.lowest,
            "since_lowest": self.since_lowest,
            "resting": self.resting,
            "shift": dict(vars(self.shift)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lowest, self.since_lowest, self.resting = (state[k] for k in ("lowest", "since_lowest", "resting"))
        vars(self.shift).update(state["shift"])
