"""Plans one layer after a window of steps: the same code in training and in replays."""

from __future__ import annotations

from typing import Any

from toolkit.experts.placement.guard import MigrationGuard
from toolkit.experts.placement.loads import Load, as_floats
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.planners.registry import Planner, planner_named


def plan_layer(
    planner: str | Planner,
    load_E: Load,
    current: ExpertPlacement,
    *,
    guard: MigrationGuard | None = None,
    steps: int,
    **options: Any,
) -> ExpertPlacement | None:
    """Plans one layer for the next window, which is assumed to be as long as the last one.

    A pure function of its arguments and of the guard's state: ranks with equal arguments get equal results.

    Args:
        planner: A planner or its name.
        load_E: The mean number of assignments per expert and step over the ranks of one EP group, in the last window.
        current: The placement now.
        guard: Decides whether a plan is worth its migration; None: every plan is.
        steps: The steps of a window.
        options: Those of the planner.

    Returns:
        The planner's placement, an earlier one that the guard returns to, or None to keep `current`. The caller must
        apply it, because the guard counts on it.

    Raises:
        UserError: If the planner is not known.
    """
    choose = planner_named(planner) if isinstance(planner, str) else planner
    load = as_floats(load_E)
    former = guard.review(load, current, steps=steps) if guard else None
    if former is not None:
        return former
    plan = choose(load, current, **options)
    accepted = guard.accepts(current, plan, steps=steps) if guard else plan != current
    return plan if accepted else None
