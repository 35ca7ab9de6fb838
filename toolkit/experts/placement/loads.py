"""The load of experts, as planners and measures of imbalance take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from toolkit.experts.placement.placement import ExpertPlacement

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Load = Tensor | NDArray[Any] | Sequence[float]
"""(E): assignments (token-expert pairs) per expert, over any window of steps. Only proportions matter."""


def as_floats(load_E: Load) -> Floats:
    """Returns `load_E` as float64 (E) on the host, wherever it was counted."""
    return np.asarray(load_E.cpu() if isinstance(load_E, Tensor) else load_E, dtype=np.float64)


def checked_load(load_E: Load, current: ExpertPlacement) -> Floats:
    """Returns `load_E` as float64 (E), scaled so that the largest is in [0.5, 1), or all are 0: no sum or quotient of
    them can overflow. The factor is a power of two, so scaling rounds nothing.

    Raises ValueError unless there is a finite number, at least 0, for each expert.
    """
    load = as_floats(load_E)
    if load.shape != (current.num_experts,):
        raise ValueError(f"load has shape {load.shape}, but the placement has {current.num_experts} experts")
    if not (np.isfinite(load).all() and (load >= 0).all()):
        raise ValueError(f"loads must be finite and at least 0, not {load[~(np.isfinite(load) & (load >= 0))][0]}")
    return np.ldexp(load, -np.frexp(load.max())[1])
