"""Planners by name, and what all of them ask of a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from toolkit.errors import UserError
from toolkit.moe.placement import ExpertPlacement

Load = Tensor | NDArray[Any] | Sequence[float]
"""Routed copies per expert (E), over any window of steps: planners look at proportions only."""

Planner = Callable[..., ExpertPlacement]
"""`planner(load_E, current, **options)`: where the experts should live, in the slots that `current` has.

A pure function: the same on every rank that calls it with the same load. Ties are broken by the lowest id.
"""

PLANNERS: dict[str, Planner] = {}
"""The planners by the name that `--planner` takes; `register_planner` adds one."""

P = TypeVar("P", bound=Planner)


def register_planner(name: str) -> Callable[[P], P]:
    """Make a planner known by `name`, for ours and for users' own; raises ValueError where the name is taken."""

    def register(planner: P) -> P:
        if name in PLANNERS:
            raise ValueError(f"there is a planner {name!r} already: choose another name")
        PLANNERS[name] = planner
        return planner

    return register


def planner_named(name: str) -> Planner:
    """The planner registered as `name`; raises UserError for an unknown one."""
    if name not in PLANNERS:
        raise UserError(f"planner {name!r} is not known: use one of {', '.join(sorted(PLANNERS))}.")
    return PLANNERS[name]


def as_floats(load_E: Load) -> NDArray[np.float64]:
    """Counters of a device, too."""
    return np.asarray(load_E.cpu() if isinstance(load_E, Tensor) else load_E, dtype=np.float64)


def checked_load(load_E: Load, current: ExpertPlacement) -> NDArray[np.float64]:
    """`load_E` as float64 (E), in proportion: the largest is at least a half and below 1, or all are 0, so that no sum
    or quotient of them leaves the range of a float. The factor is a power of two, and rounds nothing.

    Raises ValueError unless there is a finite number, at least 0, for each expert.
    """
    load = as_floats(load_E)
    if load.shape != (current.num_experts,):
        raise ValueError(f"load has shape {load.shape}, but the placement has {current.num_experts} experts")
    if not (np.isfinite(load).all() and (load >= 0).all()):
        raise ValueError(f"loads must be finite and at least 0, not {load[~(np.isfinite(load) & (load >= 0))][0]}")
    return np.ldexp(load, -np.frexp(load.max())[1])
