"""What happens to one layer between two windows of steps: the same code decides in training and in replays."""

from __future__ import annotations

from typing import Any

from toolkit.placement.guard import MigrationGuard
from toolkit.placement.loads import Load, as_floats
from toolkit.placement.placement import ExpertPlacement
from toolkit.placement.planners.registry import Planner, planner_named


def plan_layer(
    planner: str | Planner,
    load_E: Load,
    current: ExpertPlacement,
    *,
    guard: MigrationGuard | None = None,
    steps: int,
    **options: Any,
) -> ExpertPlacement | None:
    """Where the layer's experts should go after a window of `steps`: to a new plan, back to a former one, or None, to
    stay. What is returned is to be carried out: the guard takes it for done.

    `load_E`: the mean number of routed copies per expert and step over the ranks of one shard group, in that window.
    The next window is taken to be as long. `options` are the planner's. Raises UserError for an unknown planner. A pure
    function of its arguments and of the guard's state, so that ranks which agree on those agree on the result.
    """
    choose = planner_named(planner) if isinstance(planner, str) else planner
    load = as_floats(load_E)
    former = guard.review(load, current, steps=steps) if guard else None
    if former is not None:
        return former
    plan = choose(load, current, **options)
    accepted = guard.accepts(current, plan, steps=steps) if guard else plan != current
    return plan if accepted else None
