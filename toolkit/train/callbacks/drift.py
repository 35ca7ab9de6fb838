"""Detecting that the data has changed, from the loss alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer

SMALLEST_LOSS = 1e-4
"""Added to a loss, in nats, before its logarithm: losses far below this count as equal."""
LARGEST_UPDATE = 2.0
"""A value raises the running mean as if it were at most so many standard deviations above it. Otherwise a change would
become the new mean before it is detected."""


class CumulativeSum:
    """One-sided CUSUM (Page 1954, Biometrika 41, 100-115) for a rise of the mean of a series.

        g_t = max(0, g_{t-1} + z_t - slack),   alarm when g_t > threshold

    where z_t is the value's distance from an exponential moving mean, in exponential moving standard deviations, both
    of about `memory` values: so a loss that falls slowly raises no alarm. After an alarm both are estimated anew, from
    `warmup` values without alarms. `largest` caps z_t, so that no single value raises an alarm; None caps nothing.
    A value lowers the running mean as if it were at most `largest_drop` standard deviations below it.

    Raises ValueError where `largest` alone would pass the threshold.
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
        if largest is not None and threshold <= largest - slack:
            raise ValueError(f"threshold {threshold}: a single value could raise an alarm, take more")
        self.threshold, self.slack, self.memory, self.warmup = threshold, slack, memory, warmup
        self.largest = math.inf if largest is None else largest
        self.largest_drop = largest_drop
        self.reset()

    def reset(self) -> None:
        """Forget all values, as after an alarm."""
        self.seen, self.mean, self.variance, self.sum = 0, 0.0, 0.0, 0.0

    def add(self, value: float, *, least_variance: float = 1e-24) -> bool:
        """Whether the mean has risen, with this value. A smaller variance than `least_variance` is not believed."""
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


class DriftWatch(Callback):
    """Gives `detector` the logarithm of the training loss of each line of metrics: the mean over all ranks and the
    steps since the last line. `alarms` holds the steps at which it detected a rise. One small all-reduce per line."""

    def __init__(self, detector: CumulativeSum | None = None):
        self.detector = detector or CumulativeSum()
        self.alarms: list[int] = []

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.at_log_step:
            loss = trainer.sums.compute().get("loss")  # None where no label of these steps counted
            if loss is not None and self.detector.add(math.log(loss + SMALLEST_LOSS)):
                self.alarms.append(trainer.state.step)
            trainer.record("drift/alarms", len(self.alarms))

    def on_fit_end(self, trainer: Trainer) -> None:
        trainer.results["drift_alarms"] = self.alarms

    def state_dict(self) -> dict[str, Any]:
        return {"alarms": self.alarms, "detector": self.detector.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.alarms = list(state["alarms"])
        self.detector.load_state_dict(state["detector"])
