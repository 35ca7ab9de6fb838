"""When experts are moved while training, and what a plan has to be worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainValidator, PositiveFloat, PositiveInt

from toolkit.errors import UserError
from toolkit.experts.options import FractionAboveZero, Options
from toolkit.experts.placement.placement_options import PLANNER_NAMES


def _known_planner(planner: Any) -> Any:
    if planner is None or callable(planner) or planner in PLANNER_NAMES:
        return planner
    known = ", ".join(sorted(PLANNER_NAMES))
    raise UserError(field="planner", value=planner, remedy=f"take one of {known}, or none to leave experts")


if TYPE_CHECKING:
    AnyPlanner = str | Callable[..., Any] | None
else:  # a command line gives names
    AnyPlanner = Annotated[str | None, PlainValidator(_known_planner)]


class ReplanOptions(Options):
    """Replanning: experts are moved between processes while training.

    The guard measures the time of a step and counts bytes. Two of its numbers are assumptions, for you to correct:
    `link_gbytes_per_second` and `expert_time_share`. Too high a share or too fast a link has experts moved for less
    than they gain.
    """

    planner: AnyPlanner = None
    """Move experts between processes: swap, lpt, replicate, ...; none leaves them where they are."""
    every: PositiveInt = 200
    """Optimizer steps between plans."""
    guarded: bool = True
    """Skip plans whose expected gain, from measured step times, does not pay for the transfer."""
    link_gbytes_per_second: PositiveFloat | None = 10.0
    """What the guard assumes that a process sends and receives; 10 is a 100 Gbit/s network card. None measures it."""
    expert_time_share: FractionAboveZero = 0.5
    """What the guard assumes of a step to be spent in experts and their transfers, as a fraction."""

    def idle(self) -> dict[str, str]:
        if self.planner is None:
            others = [name for name in type(self).model_fields if name != "planner"]
            return super().idle() | dict.fromkeys(others, "with planner=None")
        of_guard = () if self.guarded else ("link_gbytes_per_second", "expert_time_share")
        return super().idle() | dict.fromkeys(of_guard, "with guarded=False")
