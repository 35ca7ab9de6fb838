"""Options of the callbacks that every run has, so that a command line is read before they are loaded."""

from __future__ import annotations

from pydantic import PositiveInt, field_validator

from toolkit.experts.options import Options


class CheckpointOptions(Options):
    """Checkpoints: when `Checkpointing` writes them, and how many it keeps."""

    every_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints. Default: one per epoch."""
    keep: PositiveInt = 2
    """Number of verified checkpoints to keep."""
    best: str | None = None
    """Metric of the evaluation whose checkpoint is kept and restored at the end, such as validation/loss or
    test/accuracy: the highest accuracy or F1, the lowest of all others. Default: only the newest checkpoints."""
    in_background: bool = False
    """Write checkpoints while training goes on; takes the memory of one more model with its optimizer states."""

    @field_validator("best")
    @classmethod
    def _as_recorded(cls, best: str | None) -> str | None:
        return best and best.replace("test/", "eval/")


class EarlyStoppingOptions(Options):
    """Early stopping, by evaluations on validation data."""

    patience: PositiveInt | None = None
    """Evaluations in a row without improvement of the loss, or of the metric of --checkpoint.best, after which training
    stops. Default: never."""
