"""Options of the callbacks that every run has, so that a command line is read before they are loaded."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt

from toolkit.experts.options import Options


class CheckpointOptions(Options):
    """Checkpoints: when `Checkpointing` writes them, and how many it keeps."""

    every_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints; none: one per epoch."""
    keep: PositiveInt = 2
    """Number of verified checkpoints to keep."""
    in_background: bool = False
    """Write checkpoints while training goes on; takes the memory of one more model with its optimizer states."""


class EarlyStoppingOptions(Options):
    """Early stopping, by evaluations on validation data."""

    patience: PositiveInt | None = None
    """Stop after this many evaluations without improvement; none: never."""
    metric: str = "loss"
    """Metric of the evaluations to compare, such as loss or accuracy."""
    min_delta: NonNegativeFloat = 0.0
    """Minimum change that is an improvement."""
