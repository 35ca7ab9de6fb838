"""Detecting that the data has changed, from the loss alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from toolkit.dynamic.coverage import CumulativeSum
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer

SMALLEST_LOSS = 1e-4
"""Added to a loss, in nats, before its logarithm: losses far below this count as equal."""


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
