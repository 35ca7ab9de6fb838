"""Planners by name."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TypeVar

from toolkit.errors import UserError, require_type
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.placement.placement_options import PLANNER_NAMES

Planner = Callable[..., ExpertPlacement]
"""`planner(load_E, current)`: a better placement of the experts in the slots of `current`.

A pure function: every rank calls it with the same load and has to get the same placement. These planners break
ties by the lowest id.
"""

PLANNERS: dict[str, Planner] = {}
"""Planners by their registered name."""

P = TypeVar("P", bound=Planner)


def find_planner(name: str) -> Planner:
    """Return the planner that is registered as `name`, or the function at `module:function`.

    Raises UserError if there is none.
    """
    if name in PLANNERS:
        return PLANNERS[name]
    try:
        if ":" in name:
            planner: Planner = resolve_name(name)
            return planner
    except (ImportError, AttributeError) as error:
        raise UserError(f"planner={name!r}: cannot be imported ({error}). Give module:function.") from error
    raise UserError(f"planner={name!r}: unknown. Take one of {', '.join(sorted(PLANNERS))}, or module:function.")


def register_planner(name: str) -> Callable[[P], P]:
    """Make a planner available as `planner=name`.

    Args:
        name: The name for `ReplanOptions` and the command line. A planner that has the name already is replaced.

    Returns:
        A decorator, which returns the planner as it is.

    Example:
        ```python
        from functools import partial

        from toolkit import experts

        experts.register_planner("rare_swaps")(partial(experts.planners.swap, price=0.05))
        ```
    """
    require_type("name", name, str, 'Write @register_planner("name")')

    def register(planner: P) -> P:
        PLANNERS[name] = planner
        PLANNER_NAMES.add(name)
        return planner

    return register
