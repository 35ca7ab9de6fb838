"""Detects that the model no longer covers the data: a reason to grow.

The signal is the fraction of coming samples, not yet trained on, whose target has a predicted probability below 0.5.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

HALF_PROBABILITY = 0.6931471805599453
"""-ln 0.5: a sample with a higher loss, in nats, is not covered."""

Lack = Literal["shift", "plateau"]


@dataclass
class CoverageAlarm:
    """Tells a lack of coverage from noise; `observe` takes one reading after another.

    shift     the one-sided cumulative sum of what exceeds the running mean by more than `slack` standard deviations
              passes `limit` of them (Page 1954, Biometrika 41, 100-115)
    plateau   the running mean stays above `tolerated` and has found no lower level for `patience` readings

    After an alarm the running mean starts again, after `cooldown` readings that are ignored.
    """

    tolerated: float = 0.1
    patience: int = 40
    cooldown: int = 8
    slack: float = 1.0
    limit: float = 6.0
    memory: float = 0.9
    """EMA decay of the running mean, per reading."""

    mean: float = 0.0
    variance: float = 0.0
    readings: int = 0
    """Since the last alarm."""
    excess: float = 0.0
    """The cumulative sum, in standard deviations."""
    lowest: float = 1.0
    since_lowest: int = 0
    resting: int = 0

    def observe(self, uncovered: float, samples: int) -> Lack | None:
        """The alarm that the reading `uncovered`, a fraction of `samples`, raises, if any."""
        if self.resting:
            self.resting -= 1
            return None
        if self.readings:
            # At least the sampling error of a fraction of so many samples, however steady the readings were.
            binomial = max(self.mean * (1 - self.mean), 0.5 / samples) / samples
            deviation = max(self.variance, binomial) ** 0.5
            self.excess = max(0.0, self.excess + (uncovered - self.mean) / deviation - self.slack)
            if self.excess > self.limit:
                return self._alarm("shift")
            # Otherwise the mean would follow a shift before it is detected.
            uncovered = min(uncovered, self.mean + 2 * deviation)
        kept = min(self.memory, self.readings / (self.readings + 1))
        step = uncovered - self.mean
        self.mean += (1 - kept) * step
        self.variance = kept * (self.variance + (1 - kept) * step * step) if self.readings else 0.0
        self.readings += 1
        self.since_lowest += 1
        if self.mean < 0.95 * self.lowest:
            self.lowest, self.since_lowest = self.mean, 0
        if self.mean > self.tolerated and self.since_lowest >= self.patience:
            return self._alarm("plateau")
        return None

    def _alarm(self, kind: Lack) -> Lack:
        self.mean = self.variance = self.excess = 0.0
        self.readings = self.since_lowest = 0
        self.lowest, self.resting = 1.0, self.cooldown
        return kind

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
