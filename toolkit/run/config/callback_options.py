"""Options of the callbacks that every run has, so that a command line is read before they are loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt, field_validator

from toolkit.errors import require
from toolkit.experts.options import Options


class CheckpointOptions(Options):
    """Checkpoints: when `Checkpointing` writes them, and how many it keeps."""

    every_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints; none: one per epoch."""
    keep: PositiveInt = 2
    """Number of verified checkpoints to keep."""
    best: str | None = None
    """Keep the checkpoint of the best evaluation, and end with its weights: by a metric such as validation/loss or
    test/accuracy; none: the newest alone."""
    best_is: Literal["lower", "higher"] | None = None
    """Which values of that metric are better; none: higher ones of accuracies and F1, lower ones of all others."""
    in_background: bool = False
    """Write checkpoints while training goes on; takes the memory of one more model with its optimizer states."""

    @field_validator("best")
    @classmethod
    def _names_an_evaluation(cls, best: str | None) -> str | None:
        if best is None:
            return None
        name, _, metric = best.partition("/")
        require(bool(name and metric), "best", best, "name an evaluation and its metric, such as validation/loss")
        return f"eval/{metric}" if name == "test" else best

    def idle(self) -> dict[str, str]:
        return super().idle() | ({"best_is": "without best"} if self.best is None else {})


class EarlyStoppingOptions(Options):
    """Early stopping, by evaluations on validation data."""

    patience: PositiveInt | None = None
    """Stop after this many evaluations without improvement; none: never."""
    metric: str = "loss"
    """Metric of the evaluations to compare, such as loss or accuracy."""
    min_delta: NonNegativeFloat = 0.0
    """Minimum change that is an improvement."""
