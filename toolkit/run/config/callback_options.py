"""Options of the callbacks that every run has, so that a command line is read before they are loaded."""

from __future__ import annotations

from pydantic import PositiveInt, field_validator

from toolkit.experts.options import Options
from toolkit.run.tracking.metric_names import Mode, require_mode


class CheckpointOptions(Options):
    """Checkpoints: when `Checkpointing` writes them, and how many it keeps."""

    every_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints. Default: one per epoch."""
    keep: PositiveInt = 2
    """Number of verified checkpoints to keep."""
    best: str | None = None
    """Metric of the evaluation whose checkpoint is kept and restored at the end, such as validation/loss or
    test/accuracy. Default: only the newest checkpoints."""
    best_mode: Mode | None = None
    """Whether the highest (max) or the lowest (min) value of --checkpoint.best is the best. Default: max for accuracies
    and F1, min for losses and error rates."""
    in_background: bool = False
    """Write checkpoints while training goes on; takes the memory of one more model with its optimizer states."""

    @field_validator("best")
    @classmethod
    def _as_recorded(cls, best: str | None) -> str | None:
        return best and best.replace("test/", "eval/")

    def check_together(self) -> None:
        super().check_together()
        if self.best is not None:
            require_mode(self.best, self.best_mode)


class EarlyStoppingOptions(Options):
    """Early stopping, by evaluations on validation data."""

    patience: PositiveInt | None = None
    """Evaluations in a row without improvement of the loss, or of the metric of --checkpoint.best, after which training
    stops. Default: never."""
