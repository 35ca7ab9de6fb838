"""Options of the optimizer and of the learning-rate schedule, which `toolkit.train.optim` builds."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from toolkit.errors import require
from toolkit.experts.options import Options


class OptimizerOptions(Options):
    """Optimizer, with gradient clipping."""

    kind: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for matrices and experts with AdamW for the other parameters."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices, times the learning rate; vectors have none."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip gradients to this global 2-norm; none: no clipping."""


class ScheduleOptions(Options):
    """Learning rate schedule."""

    kind: Literal["constant", "cosine", "stable_decay"] = "cosine"
    """Shape after the warm-up: constant, half a cosine to 0, or constant with a decay to 0 in the last fifth."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    warmup_epochs: NonNegativeFloat = 0.0
    """Epochs of linear warm-up, instead of steps."""

    def check_together(self) -> None:
        super().check_together()
        require(
            self.warmup_epochs == 0 or self.warmup_steps == 0,
            "warmup_epochs",
            self.warmup_epochs,
            f"warmup_steps={self.warmup_steps} says how long the warm-up is: leave one of them out",
        )
