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
"""A value raises the running mean as if it were at most so many standard deviations above it. Otherwise a change would
become the new mean before it is detected."""

Lack = Literal["shift", "plateau", "schedule"]
"""Why experts are split; "schedule" is no alarm: `grow_every` steps have passed."""


class CumulativeSum:
    """One-sided CUSUM (Page 1954, Biometrika 41, 100-115) for a rise of the mean of a series.

        g_t = max(0, g_{t-1} + z_t - slack),   alarm when g_t > threshold

    where z_t is the value's distance from an exponential moving mean, in exponential moving standard deviations, both
    of about `memory` values: so a loss that falls slowly raises no alarm. After an alarm both are estimated anew, from
    `warmup` values without alarms. `largest` caps z_t, so that no single value raises an alarm; None caps nothing.
    A value lowers the running mean as if it were at most `largest_drop` standard deviations below it.
    """

    def __init__(
        self,
        *,
        threshold: float = 8.0,
        slack: float = 0.5,
        memory: int = 15,
        warmup: int = 10,
        largest: float | None = 5.0,
        largest_drop: float = LARGEST_UPDATE,
    ):
        self.threshold, self.slack, self.memory, self.warmup = threshold, slack, memory, warmup
        self.largest = math.inf if largest is None else largest
        self.largest_drop = largest_drop
        self.reset()

    def reset(self) -> None:
        """Forgets all values, as after an alarm."""
        self.seen, self.mean, self.variance, self.sum = 0, 0.0, 0.0, 0.0

    def add(self, value: float, *, least_variance: float = 1e-24) -> bool:
        """Returns whether the mean has risen, with this value. A smaller variance than `least_variance` is not
        believed."""
        if self.seen >= self.warmup:
            scale = math.sqrt(max(self.variance, least_variance))
            self.sum = max(0.0, self.sum + min((value - self.mean) / scale, self.largest) - self.slack)
            if self.sum > self.threshold:
                self.reset()
                return True
            value = max(self.mean - self.largest_drop * scale, min(value, self.mean + LARGEST_UPDATE * scale))
        # A plain mean at first, then an exponential one; the variance after West 1979 (CACM 22, 9).
        kept = min(1 - 1 / self.memory, self.seen / (self.seen + 1))
        difference = value - self.mean
        self.mean += (1 - kept) * difference
        self.variance = kept * (self.variance + (1 - kept) * difference * difference)
        self.seen += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean, "variance": self.variance, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.mean, self.variance, self.sum = (state[k] for k in ("seen", "mean", "variance", "sum"))


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
        counters = {"lowest": self.lowest, "since_lowest": self.since_lowest, "resting": self.resting}
        return counters | {"shift": self.shift.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lowest, self.since_lowest, self.resting = (state[k] for k in ("lowest", "since_lowest", "resting"))
        self.shift.load_state_dict(state["shift"])
