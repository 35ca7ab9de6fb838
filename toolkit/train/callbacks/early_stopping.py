"""Early stopping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
from toolkit.run.config.callback_options import EarlyStoppingOptions
from toolkit.run.tracking.metric_names import is_share
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.checkpointing import Checkpointing

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


class EarlyStopping(Callback):
    """Stops after a number of evaluations in a row whose metric did not beat the best, as `options` say.

    Accuracies and F1 are better when higher, all other metrics when lower; NaN is never an improvement. `by` is the
    name of the evaluation: "validation", or "eval" in a run without validation data, whose test set then decides when
    training ends.
    """

    runs_after = (Checkpointing,)
    """A run that stopped early and is continued loads that before it would train another step."""

    def __init__(self, options: EarlyStoppingOptions, by: str = "eval"):
        self.by = by
        self.patience, self.metric, self.min_delta = options.patience, options.metric, options.min_delta
        self._sign = -1 if is_share(options.metric) else 1
        self._best: float | None = None
        self._waited = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        self._stop_if_due(trainer)

    def on_evaluate_end(self, trainer: Trainer, name: str, metrics: dict[str, float]) -> None:
        if self.patience is None or name != self.by:
            return
        if f"{name}/{self.metric}" not in metrics:
            known = ", ".join(sorted(key.removeprefix(f"{name}/") for key in metrics))
            raise UserError(field="metric", value=self.metric, remedy=f"an evaluation gives {known}: take one of them")
        value = self._sign * metrics[f"{name}/{self.metric}"]
        if not math.isnan(value) and (self._best is None or value < self._best - self.min_delta):
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

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = state["best"]
        self._waited = state["waited"]
