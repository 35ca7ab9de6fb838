"""Balancing anew in each step, for comparison: rows of busy ranks go to weights that were borrowed for this step alone.

As UltraEP does it: plan after routing, send weights to spare slots, compute, send their gradients home. No optimizer
state moves, and an expert's rows need not be divided evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.placement.imbalance import shares
from toolkit.experts.placement.loads import Floats, Ints
from toolkit.experts.placement.placement import ExpertPlacement

EVEN = 1e-3
"""Part of a rank's mean load below which nothing is borrowed."""


@dataclass(frozen=True)
class Borrowing:
    """The plan of one layer for one step."""

    share_ER: Floats
    """The part of each expert's rows that each rank computes."""
    borrowed_RR: Ints
    """Of how many experts of each rank each rank borrows the weights."""


def borrow(load_E: NDArray[Any], home: ExpertPlacement, spare_slots: int) -> Borrowing:
    """Where rows go if each rank may borrow `spare_slots` experts: as many rows of the busiest rank's busiest expert as
    it has too many go to the rank with the least load that has a slot left, until ranks are even or slots are used up.

    `home` has no replicas.
    """
    share_ER = shares(home)
    rows_ER = np.asarray(load_E, dtype=np.float64)[:, None] * share_ER
    load_R = rows_ER.sum(0)
    mean = float(load_R.mean())
    free_R = np.full(home.ranks, spare_slots)
    borrowed_RR = np.zeros((home.ranks, home.ranks), dtype=np.int64)
    owner_E = share_ER.argmax(1)
    while free_R.any():
        busiest = int(load_R.argmax())
        lightest = int(np.where(free_R > 0, load_R, np.inf).argmin())
        most = min(load_R[busiest] - mean, mean - load_R[lightest])
        if most <= EVEN * mean:
            break
        expert = int(np.where(owner_E == busiest, rows_ER[:, busiest], -1.0).argmax())
        rows = min(most, float(rows_ER[expert, busiest]))
        rows_ER[expert, [busiest, lightest]] += [-rows, rows]
        load_R[[busiest, lightest]] += [-rows, rows]
        free_R[lightest] -= 1
        borrowed_RR[busiest, lightest] += 1
    total_E = rows_ER.sum(1, keepdims=True)
    return Borrowing(np.where(total_E > 0, rows_ER / np.where(total_E > 0, total_E, 1), share_ER), borrowed_RR)
