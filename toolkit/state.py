"""Where a run is. Two integers: everything else follows from them and the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TrainState:
    step: int = 0
    """Optimizer steps done; also the position in the data, see `toolkit.data.batches`."""
    samples: int = 0
    """Training samples seen over all ranks."""
