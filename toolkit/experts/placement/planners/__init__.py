"""Planners: pure functions from a load and the present placement to a better placement, by name."""

from toolkit.experts.placement.planners.registry import PLANNERS, Planner, find_planner, register_planner
from toolkit.experts.placement.planners.replicas import replicate
from toolkit.experts.placement.planners.simple import contiguous, lpt, round_robin, swap

__all__ = [
    "PLANNERS",
    "Planner",
    "contiguous",
    "find_planner",
    "lpt",
    "register_planner",
    "replicate",
    "round_robin",
    "swap",
]
