"""Names of planners, initial placements and exchanges, which a command line checks before torch is loaded."""

from __future__ import annotations

from typing import Literal

PLANNER_NAMES = {"contiguous", "lpt", "replicate", "round_robin", "swap"}
"""The names of planners. `register_planner` adds a user's own, so that a name is checked before torch is loaded."""
InitialPlacement = Literal["contiguous", "round_robin"]
"""Blocks of consecutive experts on each rank, or expert e on rank e modulo ranks."""
ExpertExchange = Literal["flat", "hierarchical"]
"""All-to-all between the ranks of an EP group: to each rank, or first to each node (hierarchical)."""
