"""Replays recorded loads under a planner: the placements and rank loads that it would have led to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import MigrationGuard, plan_layer
from toolkit.experts.placement.loads import max_over_mean, shares
from toolkit.experts.placement.placement import ExpertPlacement, moves
from toolkit.experts.placement.planners.registry import Planner


@dataclass(frozen=True)
class Replay:
    """One layer, replayed."""

    load_TR: NDArray[np.float64]
    """Rows per step and rank; replicas share an expert's rows equally."""
    placements: tuple[ExpertPlacement, ...]
    """The placements in force from step 0, `every`, 2 * `every`, and so on."""
    every: int

    @property
    def imbalance_T(self) -> NDArray[np.float64]:
        """Max over mean of each step."""
        return max_over_mean(self.load_TR)

    @property
    def experts_moved(self) -> list[int]:
        """Physical experts that left their rank after each window."""
        pairs = zip(self.placements, self.placements[1:], strict=False)
        return [sum(move.travels for move in moves(old, new)) for old, new in pairs]


def replay(
    load_TE: NDArray[Any],
    start: ExpertPlacement,
    planner: Planner | None,
    *,
    every: int,
    guard: MigrationGuard | None = None,
) -> Replay:
    """Replays recorded loads with a plan after each window of steps, made for the window's mean load.

    Args:
        load_TE: int64 (steps, E), the assignments to each expert.
        start: The placement of the first window.
        planner: The planner; None plans nothing.
        every: The steps of a window.
        guard: Decides whether a plan is carried out; None: all are.
    """
    placement = start
    placements = [start]
    loads_TR = []
    for first in range(0, len(load_TE), every):
        window_TE = load_TE[first : first + every]
        loads_TR.append(window_TE @ shares(placement))
        if planner is not None and first + every < len(load_TE):
            plan = plan_layer(planner, window_TE.mean(0), placement, guard=guard, steps=every)
            placement = plan or placement
        placements.append(placement)
    return Replay(np.concatenate(loads_TR), tuple(placements[: -(-len(load_TE) // every)]), every)


def worst_span(load_TE: NDArray[Any], run: Replay, cost_model: CostModel) -> float:
    """Returns the seconds with plans over those without, in the worst span of two plans: at most 1 where planning was
    never worse. Migrations are included; without plans means under the placement before the two."""

    def compute(loads: NDArray[Any], placement: ExpertPlacement) -> float:
        return float(cost_model.expert_seconds(loads @ shares(placement), placement.slots_per_rank).sum())

    worst = 0.0
    for before, first, second, start in zip(
        run.placements, run.placements[1:], run.placements[2:], range(run.every, len(load_TE), run.every), strict=False
    ):
        span_TE = load_TE[start : start + 2 * run.every]
        spent = compute(span_TE[: run.every], first) + compute(span_TE[run.every :], second)
        spent += cost_model.migration_seconds(before, first) + cost_model.migration_seconds(first, second)
        worst = max(worst, spent / compute(span_TE, before))
    return worst
