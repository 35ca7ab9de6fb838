"""The settings of recipes with experts: their number and placement, the router, and dynamic experts."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.dynamic.lifecycle_options import LifecycleOptions
from toolkit.errors import require
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.parallel_options import GroupOptions, check_group_size
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.run.config.run import RunConfig


class ExpertRunConfig(RunConfig, GroupOptions):
    """The settings of a run with experts: those of `RunConfig`, the number of experts, and where they are placed.

    Raises UserError, with the flag, its value and the remedy, for settings that cannot be, alone or together.
    """

    experts: NonNegativeInt = 8
    """Experts per MoE layer; 0 for a dense network of equal active size."""
    top_k: PositiveInt = 2
    """Experts per token."""
    expert_hidden_size: PositiveInt = 128
    """Hidden units of each expert."""
    parallel_strategy: Literal["data_parallel", "expert_parallel"] = "expert_parallel"
    """On several processes, replicate all experts (data_parallel) or distribute them (expert_parallel)."""
    replan: ReplanOptions = ReplanOptions()
    spare_slots: NonNegativeInt = 0
    """Spare expert slots on each process, for the replicas of the planner replicate."""
    initial_placement: InitialPlacement | None = None
    """Place experts at the start in blocks of consecutive ids or round-robin; none: blocks, with --max-experts
    round-robin."""
    record_traces: bool = False
    """Write the routing of each forward to traces.npz in the run's folder, for `toolkit lab`."""
    balance_weight: NonNegativeFloat = 0.007
    """Weight of the balance loss."""
    z_weight: NonNegativeFloat = 0.0
    """Weight of the router z-loss."""

    def check_together(self) -> None:
        super().check_together()
        dense = self.experts == 0 and self.top_k != 1
        require(not dense, "experts", 0, f"a dense network has no top_k={self.top_k}: add top_k=1")
        most = max(1, self.experts)
        require(self.top_k <= most, "top_k", self.top_k, f"take 1 to {most}, the number of experts")
        is_spread = self.parallel_strategy == "expert_parallel"
        remedy = "leave it out, or use parallel_strategy='expert_parallel'"
        require(self.ep_stride == 1 or is_spread, "ep_stride", self.ep_stride, remedy)
        require(self.ep_size in (None, 1) or is_spread, "ep_size", self.ep_size, remedy)
        exchanges = self.experts > 0 and is_spread and self.ep_size != 1
        remedy = "use flat, because no experts are spread over processes"
        require(exchanges or self.exchange == "flat", "exchange", self.exchange, remedy)
        if self.ep_size is not None:
            remedy = f"take at most {most}, the number of experts"
            require(self.ep_size <= most, "ep_size", self.ep_size, remedy)
            if self.num_processes is not None:
                check_group_size(self.num_processes, self.ep_size, self.ep_stride)

    @property
    def logical_experts(self) -> int:
        """Rows of the router: the experts, and with dynamic experts those that are inactive at first."""
        return self.experts

    def ep_size_in(self, world_size: int) -> int:
        """Processes in an EP group, out of `world_size`."""
        if self.parallel_strategy == "data_parallel":
            return 1
        return self.ep_size or math.gcd(world_size, self.logical_experts)


class MoERunConfig(ExpertRunConfig, RouterOptions):
    """The settings of a run whose MoE layers are the toolkit's: those of `ExpertRunConfig` and `RouterOptions`, and the
    layers' capacity and memory.

    Raises UserError, with the flag, its value and the remedy, for settings that cannot be, alone or together.
    """

    balance_scope: Literal["global", "local", "sequence"] = "global"
    """Average the balance loss over the tokens of the global batch, of each process, or of each sequence."""
    balance_within: PositiveInt | None = None
    """Raise the weight of the balance loss in a run of fewer optimizer steps, in proportion, up to ten times; none: the
    same weight in every run."""
    capacity_factor: PositiveFloat | None = None
    """Drop assignments of an expert beyond this many times the mean load; none drops nothing."""
    drop_policy: Literal["probs", "position"] = "probs"
    """Beyond the capacity, drop the assignments with the lowest weights, or those of the latest tokens."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Save memory by computing again in the backward: the experts' hidden activations, or the whole layer."""

    def idle(self) -> dict[str, str]:
        of_loss = ("balance_weight", "balance_scope", "balance_within") if self.balance != "loss" else ()
        undropped = {"drop_policy": "with capacity_factor=None"} if self.capacity_factor is None else {}
        return super().idle() | dict.fromkeys(of_loss, f"with balance={self.balance!r}") | undropped

    def balance_weight_in(self, steps: int) -> float:
        """Returns the weight of the balance loss in a run of so many optimizer steps; 0 where nothing asks for it."""
        if self.balance != "loss":
            return 0.0
        return self.balance_weight * min(10.0, max(1.0, (self.balance_within or 0) / steps))

    @property
    def router_options(self) -> RouterOptions:
        """The fields that the router of each layer takes."""
        return RouterOptions(**{name: getattr(self, name) for name in RouterOptions.model_fields})


class DynamicRunConfig(MoERunConfig):
    """The settings of a run whose experts may be split, merged and pruned: those of `MoERunConfig`, how many experts
    there may be, and `lifecycle`, which says when they change. They are dynamic where `max_experts` is given.

    Raises UserError, with the flag, its value and the remedy, for settings that cannot be, alone or together.
    """

    max_experts: PositiveInt | None = None
    """Maximum number of experts per layer: makes them dynamic (split, merged, pruned); none: a fixed number."""
    min_experts: PositiveInt = 2
    """Minimum number of experts per layer, with --max-experts."""
    lifecycle: LifecycleOptions = LifecycleOptions()

    def idle(self) -> dict[str, str]:
        fixed = ("min_experts", "lifecycle") if self.max_experts is None else ()
        return super().idle() | dict.fromkeys(fixed, "with max_experts=None")

    def check_together(self) -> None:
        super().check_together()
        limit = self.max_experts
        if limit is None:
            return
        require(self.experts >= 1, "experts", self.experts, "take one or more with max_experts")
        require(limit >= self.experts, "max_experts", limit, f"take experts={self.experts} or more")
        fits = self.top_k <= self.min_experts <= self.experts
        require(fits, "min_experts", self.min_experts, f"take top_k={self.top_k} to experts={self.experts}")
        for name, required in (("force_balanced", False), ("spare_slots", 0), ("compile", False)):
            value = getattr(self, name)
            require(value == required, name, value, "leave it out: dynamic experts (max_experts) do not support it")
        place = self.initial_placement
        require(place is None, "initial_placement", place, "leave it out: max_experts places experts round-robin")
        require(self.dense_parallel == "ddp", "dense_parallel", self.dense_parallel, "use ddp with max_experts")

    @property
    def logical_experts(self) -> int:
        return self.max_experts or self.experts
