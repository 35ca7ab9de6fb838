"""When experts are moved while training, and what a plan has to save."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import PlainValidator, PositiveInt

from toolkit.errors import UserError
from toolkit.experts.options import Options
from toolkit.experts.placement.placement_options import PLANNER_NAMES


def _known_planner(planner: Any) -> Any:
    is_name = isinstance(planner, str) and (planner in PLANNER_NAMES or ":" in planner)
    if planner is None or is_name or (callable(planner) and not isinstance(planner, type)):
        return planner
    names = ", ".join(sorted(PLANNER_NAMES))
    raise UserError(field="planner", value=planner, remedy=f"take one of {names}, or module:function")


if TYPE_CHECKING:
    AnyPlanner = str | Callable[..., Any] | None
else:  # a command line gives names
    AnyPlanner = Annotated[str | None, PlainValidator(_known_planner)]


class ReplanOptions(Options):
    """Rebalancing: experts move between ranks while training.

    By default a guard applies a plan only if its predicted saving outweighs its migration. It measures the time of
    the experts and the speed of the link between ranks.

    Example:
        >>> from toolkit.experts import ReplanOptions
        >>> options = ReplanOptions(planner="swap", every=100)
    """

    switch: ClassVar[str] = "planner"

    planner: AnyPlanner = None
    """Planner that rebalances experts: swap, lpt, replicate, ..., or module:function. Default: none, experts stay."""
    every: PositiveInt = 200
    """Optimizer steps between plans."""
    guarded: bool = True
    """Apply only plans whose predicted saving, from measured times, outweighs the migration."""
