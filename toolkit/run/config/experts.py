"""Settings of recipes with experts: number, placement and router."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.parallel_options import GroupOptions
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.run.config.run import RunConfig


class ExpertRunConfig(RunConfig, GroupOptions):
    """Settings of a run with experts: `RunConfig` plus number and placement of experts."""

    experts: NonNegativeInt = 8
    """Experts per MoE layer; 0 for a dense network of equal active size."""
    top_k: PositiveInt = 2
    """Experts per token."""
    expert_hidden_size: PositiveInt = 128
    """Hidden units of each expert."""
    replan: ReplanOptions = ReplanOptions()
    spare_slots: NonNegativeInt = 0
    """Spare expert slots on each process, for the replicas of the planner replicate."""
    initial_placement: InitialPlacement = "contiguous"
    """Place experts at the start in blocks of consecutive ids or round-robin, as dynamic experts always are."""
    record_traces: bool = False
    """Write the routing of each forward pass to traces.npz in the run's folder, for `toolkit lab`."""
    balance_weight: NonNegativeFloat = 0.007
    """Weight of the load-balancing loss."""
    z_weight: NonNegativeFloat = 0.0
    """Weight of the router z-loss."""

    @property
    def logical_experts(self) -> int:
        """Rows of the router: the experts, including initially inactive dynamic experts."""
        return self.experts

    def ep_size_in(self, world_size: int) -> int:
        """Return the ranks in an EP group, out of `world_size`."""
        return self.ep_size or math.gcd(world_size, self.logical_experts)


class MoERunConfig(ExpertRunConfig, RouterOptions):
    """Settings of a run with the toolkit's MoE layers: `ExpertRunConfig` and `RouterOptions` plus capacity and
    memory."""

    balance_within: PositiveInt | None = None
    """Raise the weight of the load-balancing loss in a run of fewer optimizer steps, in proportion, up to ten times.
    Default: the same weight in every run."""
    capacity_factor: PositiveFloat | None = None
    """Drop the (token, expert) pairs of an expert beyond this many times the mean load, lowest weights first. Default:
    drop nothing."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: of the experts' hidden activations (selective), or of the whole layer (full)."""

    def balance_weight_in(self, steps: int) -> float:
        """Return the weight of the load-balancing loss in a run of `steps` steps; 0 unless `balance` is loss."""
        if self.balance != "loss":
            return 0.0
        return self.balance_weight * min(10.0, max(1.0, (self.balance_within or 0) / steps))

    @property
    def router_options(self) -> RouterOptions:
        """Options of the router of each layer."""
        return RouterOptions(**{name: getattr(self, name) for name in RouterOptions.model_fields})
