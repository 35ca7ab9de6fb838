"""How evenly a load is spread over experts and over ranks. The same functions serve live counters and recorded traces.

Letters: `E` experts, `R` ranks. A load is a number of assignments (token-expert pairs), over any window of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.placement.loads import Floats, Load, as_floats, checked_load
from toolkit.experts.placement.placement import ExpertPlacement


def shares(placement: ExpertPlacement) -> Floats:
    """Returns (E, R), the fraction of each expert's load that each rank computes; replicas share it equally."""
    share_ER = np.zeros((placement.num_experts, placement.ranks))
    for expert in range(placement.num_experts):
        places = placement.replicas(expert)
        share_ER[expert, [place.rank for place in places]] = 1 / len(places)
    return share_ER


def max_over_mean(load: NDArray[Any]) -> Floats:
    """Returns max / mean over the last axis (1 where there is no load), for each step or layer.

    Average the result over steps, not the loads: a mean of loads hides the imbalance of each step.
    """
    mean = np.asarray(load.mean(-1), dtype=np.float64)
    return np.divide(load.max(-1), mean, out=np.ones_like(mean), where=mean > 0)


def rank_imbalance(load_E: Load, placement: ExpertPlacement) -> float:
    """Returns max / mean of the load per rank: how much longer the busiest rank computes than with a balanced load."""
    return float(max_over_mean(checked_load(load_E, placement) @ shares(placement)))


@dataclass(frozen=True)
class ExpertImbalance:
    """How evenly the router spreads assignments over experts, whatever their placement."""

    max_violation: float
    """MaxVio: max / mean - 1."""
    variation: float
    """Standard deviation / mean."""
    entropy: float
    """Normalised entropy of the fractions: 1 when balanced, 0 when one expert gets everything."""


def expert_imbalance(load_E: Load) -> ExpertImbalance:
    """Returns the measures of one load (E). Without any assignments it counts as balanced, and each expert as dead."""
    load = as_floats(load_E)
    mean = float(load.mean())
    if not mean:
        return ExpertImbalance(0.0, 0.0, 1.0)
    fraction = load[load > 0] / load.sum()
    entropy = float(-(fraction * np.log(fraction)).sum() / np.log(len(load))) if len(load) > 1 else 1.0
    return ExpertImbalance(float(load.max()) / mean - 1, float(load.std()) / mean, max(0.0, entropy))
