"""The load of experts, and how evenly it is spread over experts and ranks; live counters and recorded traces alike.

Letters: `E` experts, `P` ranks of an EP group. A load is a number of (token, expert) pairs, over any window of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from toolkit.experts.placement.placement import ExpertPlacement

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Load = Tensor | NDArray[Any] | Sequence[float]
"""(E,): (token, expert) pairs per expert, over any window of steps. Only proportions matter."""


PARTS = 8
"""Parts of a window."""


@dataclass(frozen=True)
class Window:
    """The load of one layer in the steps between two plans, in parts of one step or more."""

    load_SE: Floats
    """Mean pairs per expert and step in each part."""
    steps_S: Ints

    @property
    def steps(self) -> int:
        return int(self.steps_S.sum())

    @property
    def load_E(self) -> Floats:
        """The mean pairs per expert and step."""
        return np.asarray(np.average(self.load_SE, axis=0, weights=self.steps_S))

    def halves(self) -> tuple[Window, Window]:
        """Return the earlier and the later half of the parts."""
        half = len(self.steps_S) // 2
        return Window(self.load_SE[:half], self.steps_S[:half]), Window(self.load_SE[half:], self.steps_S[half:])


def steps_of_parts(steps: int) -> Ints:
    """Return the steps of each part of a window."""
    return np.array([len(part) for part in np.array_split(range(steps), min(PARTS, steps))])


def window_of(load_TE: NDArray[Any]) -> Window:
    """Return the window of steps with the loads `load_TE` (T, E)."""
    steps_S = steps_of_parts(len(load_TE))
    parts = np.split(load_TE, steps_S.cumsum()[:-1])
    return Window(np.stack([part.mean(0) for part in parts]), steps_S)


def as_floats(load_E: Load) -> Floats:
    """Return `load_E` as float64 (E,) on the host."""
    return np.asarray(load_E.cpu() if isinstance(load_E, Tensor) else load_E, dtype=np.float64)


def checked_load(load_E: Load, current: ExpertPlacement) -> Floats:
    """Return `load_E` as float64 (E,), scaled so that the largest is in [0.5, 1), or all are 0: no sum or quotient of
    them can overflow. The factor is a power of two, so scaling rounds nothing.

    Raises:
        ValueError: Unless there is a finite number, at least 0, for each expert.
    """
    load = as_floats(load_E)
    if load.shape != (current.num_experts,):
        raise ValueError(f"load has shape {load.shape}, but the placement has {current.num_experts} experts")
    if not (np.isfinite(load).all() and (load >= 0).all()):
        raise ValueError(f"loads must be finite and at least 0, not {load[~(np.isfinite(load) & (load >= 0))][0]}")
    return np.ldexp(load, -np.frexp(load.max())[1])


def shares(placement: ExpertPlacement) -> Floats:
    """Return (E, P), the fraction of each expert's load that each rank computes; replicas share it equally."""
    share_EP = np.zeros((placement.num_experts, placement.ranks))
    for expert in range(placement.num_experts):
        places = placement.replicas(expert)
        share_EP[expert, [place.rank for place in places]] = 1 / len(places)
    return share_EP


def max_over_mean(load: NDArray[Any]) -> Floats:
    """Return max / mean over the last axis (1 without load), for each step or layer.

    Average the result over steps, not the loads: a mean of loads hides the imbalance of each step.
    """
    mean = np.asarray(load.mean(-1), dtype=np.float64)
    return np.divide(load.max(-1), mean, out=np.ones_like(mean), where=mean > 0)


def rank_imbalance(load_E: Load, placement: ExpertPlacement) -> float:
    """Return max / mean of the load per rank: how much longer the busiest rank computes than with a balanced load."""
    return float(max_over_mean(checked_load(load_E, placement) @ shares(placement)))


@dataclass(frozen=True)
class ExpertImbalance:
    """How evenly the router spreads pairs over experts, whatever their placement."""

    max_violation: float
    """MaxVio: max / mean - 1."""
    variation: float
    """Standard deviation / mean."""
    entropy: float
    """Normalised entropy of the fractions: 1 when balanced, 0 when one expert gets everything."""


def expert_imbalance(load_E: Load) -> ExpertImbalance:
    """Return the measures of one load (E,). A load of zeros counts as balanced."""
    load = as_floats(load_E)
    mean = float(load.mean())
    if not mean:
        return ExpertImbalance(0.0, 0.0, 1.0)
    fraction = load[load > 0] / load.sum()
    entropy = float(-(fraction * np.log(fraction)).sum() / np.log(len(load))) if len(load) > 1 else 1.0
    return ExpertImbalance(float(load.max()) / mean - 1, float(load.std()) / mean, max(0.0, entropy))
