"""Planners by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.placement_options import PLANNER_NAMES, import_planner

Planner = Callable[..., ExpertPlacement]
"""`planner(load_E, current)`: a better placement of the experts in the slots of `current`.

A pure function: every rank calls it with the same load and has to get the same placement. Ours break ties by the lowest
id.
"""

PLANNERS: dict[str, Planner] = {}
"""Planners by their registered name."""

P = TypeVar("P", bound=Planner)


def planner_named(name: str) -> Planner:
    """Return the registered planner of this name, or the planner at "package.module:function"."""
    return PLANNERS[name] if name in PLANNERS else import_planner(name)


def register_planner(name: str) -> Callable[[P], P]:
    """Make a planner available as `planner=name`.

    Args:
        name: The name for `ReplanOptions` and the command line. A planner that has the name already is replaced.

    Returns:
        A decorator, which returns the planner as it is.

    Example:
        ```python
        from functools import partial

        from toolkit.experts.placement.planners import register_planner, swap

        register_planner("rare_swaps")(partial(swap, gain=0.05))
        ```
    """

    def register(planner: P) -> P:
        PLANNERS[name] = planner
        PLANNER_NAMES.add(name)
        return planner

    return register
