"""The progress of a run: two integers, from which the configuration determines the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TrainState:
    """How far a run has come; saved in each checkpoint."""

    step: int = 0
    """Optimizer steps done. Also the position in the data: see `toolkit.data.batches`."""
    samples: int = 0
    """Training samples seen over all ranks."""
