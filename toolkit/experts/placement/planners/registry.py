"""Planners by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from toolkit.errors import UserError
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.placement_options import PLANNER_NAMES

Planner = Callable[..., ExpertPlacement]
"""`planner(load_E, current, **options)`: a better placement of the experts in the slots that `current` has.

A pure function: the same on every rank that calls it with the same load. Ties are broken by the lowest id.
"""

PLANNERS: dict[str, Planner] = {}
"""The planners by name; `register_planner` adds one."""

P = TypeVar("P", bound=Planner)


def register_planner(name: str) -> Callable[[P], P]:
    """Makes a planner known by `name`, for ours and for users' own; raises ValueError where the name is taken."""

    def register(planner: P) -> P:
        if name in PLANNERS:
            raise ValueError(f"there is a planner {name!r} already: choose another name")
        PLANNERS[name] = planner
        PLANNER_NAMES.add(name)
        return planner

    return register


def planner_named(name: str) -> Planner:
    """Returns the planner registered as `name`; raises UserError for an unknown one."""
    if name not in PLANNERS:
        raise UserError(f"planner {name!r} is not known: use one of {', '.join(sorted(PLANNERS))}.")
    return PLANNERS[name]
