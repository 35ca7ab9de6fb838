"""Noticing that the data has changed, by the loss alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from toolkit.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.trainer import Trainer


SMALLEST_LOSS = 1e-4
"""Losses far below this are alike, in nats."""


class CumulativeSum:
    """One-sided CUSUM (Page 1954, Biometrika 41) for a rise of the mean of a series.

        g_t = max(0, g_{t-1} + z_t - slack),   alarm when g_t > threshold

    where z_t is the value's distance from what is usual, in standard deviations. What is usual follows the series, an
    exponential mean and variance of about `memory` values, so that a loss that falls slowly is no change. After an
    alarm it is learned anew, from `warmup` values.
    """

    largest = 5.0
    """Deviations count at most so much in the sum, so that no single value raises an alarm ..."""
    largest_usual = 2.0
    """... and so much in what is usual, so that a change does not become usual before it is noticed."""

    def __init__(self, *, threshold: float = 8.0, slack: float = 0.5, memory: int = 15, warmup: int = 10):
        if threshold <= self.largest - slack:
            raise ValueError(f"threshold {threshold}: a single value could raise an alarm, take more")
        self.threshold, self.slack, self.memory, self.warmup = threshold, slack, memory, warmup
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.seen, self.mean, self.variance, self.sum = 0, 0.0, 0.0, 0.0

    def add(self, value: float) -> bool:
        """Whether, with this value, the series has changed."""
        if self.seen >= self.warmup:
            scale = math.sqrt(self.variance) + 1e-12
            deviation = (value - self.mean) / scale
            self.sum = max(0.0, self.sum + min(deviation, self.largest) - self.slack)
            if self.sum > self.threshold:
                self._begin_anew()
                return True
            value = self.mean + scale * max(-self.largest_usual, min(deviation, self.largest_usual))
        self.seen += 1
        # A plain mean at first, then an exponential one; the variance after West 1979 (CACM 22, 9).
        weight = 1 / min(self.seen, self.memory)
        difference = value - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference**2)
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean, "variance": self.variance, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.mean, self.variance, self.sum = (state[k] for k in ("seen", "mean", "variance", "sum"))


class DriftWatch(Callback):
    """Asks `detector` about each line of metrics: the logarithm of the training loss, a mean over all ranks and the
    steps since the last line. `alarms` are the steps at which it said yes. A small reduction per line."""

    def __init__(self, detector: CumulativeSum | None = None):
        self.detector = detector or CumulativeSum()
        self.alarms: list[int] = []

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.at_log_step:
            if self.detector.add(math.log(trainer.sums.compute()["loss"] + SMALLEST_LOSS)):
                self.alarms.append(trainer.state.step)
            trainer.record("drift/alarms", len(self.alarms))

    def on_fit_end(self, trainer: Trainer) -> None:
        trainer.results["drift_alarms"] = self.alarms

    def state_dict(self) -> dict[str, Any]:
        return {"alarms": self.alarms, "detector": self.detector.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.alarms = list(state["alarms"])
        self.detector.load_state_dict(state["detector"])
