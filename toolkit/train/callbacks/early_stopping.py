"""Early stopping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from toolkit.run.tracking.metric_names import Mode, require_mode
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.checkpointing import Checkpointing

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row that did not improve on the best.

    NaN is never an improvement.

    Args:
        patience: Evaluations without improvement; None: never stop.
        metric: The metric of an evaluation to compare, such as validation/loss.
        mode: Whether the highest (max) or lowest (min) value is the best. Default: as the name of an accuracy, F1, loss
            or error rate says.

    Raises:
        UserError: `mode` is missing for another metric.
    """

    runs_after = (Checkpointing,)
    """A run that stopped early and is continued loads that before it would train another step."""

    state_attributes = ("_best", "_waited")

    def __init__(self, patience: int | None, metric: str, mode: Mode | None = None):
        self.patience, self.metric = patience, metric
        self._sign = -1 if require_mode(metric, mode) == "max" else 1
        self._best: float | None = None
        self._waited = 0

    def on_evaluate_end(self, trainer: Trainer, name: str, metrics: dict[str, float]) -> None:
        if self.patience is None or name != self.metric.partition("/")[0]:
            return
        value = self._sign * metrics[self.metric]
        if not math.isnan(value) and (self._best is None or value < self._best):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self.patience is not None and self._waited >= self.patience:
            reason = f"{self.metric} was no better for {self._waited} evaluations"
            trainer.results["stopped_early"] = reason
            trainer.run.print(f"stopping at step {trainer.state.step:,}: {reason}")
            trainer.request_stop(reason)

    on_fit_start = _stop_if_due
