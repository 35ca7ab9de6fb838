"""The settings of recipes with experts: their number and placement, the router, and dynamic experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from toolkit.run.config.choices import require_choices
from toolkit.run.config.router import RouterOptions
from toolkit.run.config.run import RunConfig, require

PLANNER_NAMES = {"affinity", "contiguous", "few_swaps", "lpt", "node_aware", "replicate", "round_robin", "swap"}
"""What `--planner` takes. `register_planner` adds a user's own, so that a name is checked before torch is loaded."""
ExpertExchange = Literal["flat", "hierarchical"]
"""How rows travel between the ranks of an EP group: to each rank, or once to each node and on from there."""
InitialPlacement = Literal["contiguous", "round_robin"]
"""Blocks of consecutive experts on each rank, or expert e on rank e modulo ranks."""


@dataclass(frozen=True, kw_only=True)
class ExpertRunConfig(RunConfig):
    """The settings of a run with experts: those of `RunConfig`, the number of experts, and where they are placed.

    Raises UserError, with the flag, its value and the remedy, for settings that cannot be, alone or together.
    """

    help_heading: ClassVar[str] = "Experts and their placement"

    experts: int = 8
    """Experts per MoE layer; 0 for a dense network of equal active size."""
    top_k: int = 2
    """Experts per token."""
    expert_hidden_size: int = 128
    """Hidden units of each expert."""
    parallel_strategy: Literal["data_parallel", "expert_parallel"] = "expert_parallel"
    """On several processes, replicate all experts (data_parallel) or distribute them (expert_parallel)."""
    ep_size: int | None = None
    """Processes in an expert-parallel group; none: the most that divide processes and experts."""
    ep_stride: int = 1
    """How far apart the processes of an expert-parallel group are; 1: neighbours."""
    exchange: ExpertExchange = "flat"
    """Send a token to every process that has experts of it (flat), or once to each node that has (hierarchical)."""
    dispatch_chunks: int = 1
    """Send tokens to experts in this many parts, so that experts compute one while the rows of others travel."""
    planner: str | None = None
    """Move experts between processes: swap, lpt, replicate, ..."""
    replan_every: int = 200
    """Optimizer steps between plans."""
    spare_slots: int = 0
    """Spare expert slots on each process, for the replicas of --planner replicate."""
    initial_placement: InitialPlacement | None = None
    """Place experts at the start in blocks of consecutive ids or round-robin; none: blocks, with --max-experts
    round-robin."""
    guard: bool = True
    """Skip plans whose expected gain, from measured step times, does not pay for the transfer."""
    link_gbytes_per_second: float | None = 10.0
    """What the guard assumes that a process sends and receives; 10 is a 100 Gbit/s network card. None measures it."""
    expert_time_share: float = 0.5
    """What the guard assumes of a step to be spent in experts and their transfers, as a fraction."""
    record_traces: bool = False
    """Write the routing of each forward to traces.npz in the run's folder, for `toolkit lab`."""
    balance_weight: float = 0.007
    """Weight of the balance loss."""
    z_weight: float = 0.0
    """Weight of the router z-loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.experts >= 0, "experts", self.experts, "take one or more, or 0 for a dense network")
        require(self.expert_hidden_size >= 1, "expert_hidden_size", self.expert_hidden_size, "take one or more")
        dense = self.experts == 0 and self.top_k != 1
        require(not dense, "experts", 0, f"a dense network has no --top-k {self.top_k}: add --top-k 1")
        most = max(1, self.experts)
        require(1 <= self.top_k <= most, "top_k", self.top_k, f"take 1 to {most}, the number of --experts")
        for name in ("balance_weight", "z_weight"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "take zero or more")
        known = self.planner is None or self.planner in PLANNER_NAMES
        require(
            known, "planner", self.planner, f"take one of {', '.join(sorted(PLANNER_NAMES))}, or none to leave experts"
        )
        require(self.replan_every >= 1, "replan_every", self.replan_every, "take one step or more")
        require(self.spare_slots >= 0, "spare_slots", self.spare_slots, "take zero or more")
        speed, share = self.link_gbytes_per_second, self.expert_time_share
        require(speed is None or 0 < speed < math.inf, "link_gbytes_per_second", speed, "take a positive number")
        require(0 < share <= 1, "expert_time_share", share, "take a fraction above 0, up to 1")
        require(self.ep_stride >= 1, "ep_stride", self.ep_stride, "take one or more")
        if self.ep_stride > 1:
            spread = self.parallel_strategy == "expert_parallel"
            require(spread, "ep_stride", self.ep_stride, "leave it out, or use --parallel-strategy expert_parallel")
        require(self.dispatch_chunks >= 1, "dispatch_chunks", self.dispatch_chunks, "take one or more")
        exchanged = self.experts > 0 and self.parallel_strategy == "expert_parallel" and self.ep_size != 1
        for name, usual in (("exchange", "flat"), ("dispatch_chunks", 1)):
            value = getattr(self, name)
            spread = exchanged or value == usual
            require(spread, name, value, f"use {usual}, because no experts are spread over processes")
        overlaps = self.dispatch_chunks == 1 or not self.compile
        require(overlaps, "dispatch_chunks", self.dispatch_chunks, "use 1 with --compile, which lets nothing overlap")
        if self.ep_size is not None:
            require(self.ep_size >= 1, "ep_size", self.ep_size, "take one or more")
            replicated = self.parallel_strategy == "data_parallel" and self.ep_size > 1
            require(not replicated, "ep_size", self.ep_size, "leave it out, or use --parallel-strategy expert_parallel")
            fits = self.ep_size <= most
            require(fits, "ep_size", self.ep_size, f"take at most {most}, the number of --experts")
            if self.num_processes is not None:
                fits = self.num_processes % self.ep_size == 0
                require(fits, "ep_size", self.ep_size, f"it must divide --num-processes {self.num_processes}")
                fits = self.num_processes // self.ep_size % self.ep_stride == 0
                groups = f"{self.num_processes // self.ep_size} group(s) of --ep-size {self.ep_size}"
                require(fits, "ep_stride", self.ep_stride, f"it must divide the {groups}")

    @property
    def logical_experts(self) -> int:
        """Rows of the router: the experts, and with dynamic experts those that are inactive at first."""
        return self.experts

    def ep_size_in(self, world_size: int) -> int:
        """Processes in an EP group, out of `world_size`."""
        if self.parallel_strategy == "data_parallel":
            return 1
        return self.ep_size or math.gcd(world_size, self.logical_experts)

    def group_options(self, world_size: int) -> dict[str, Any]:
        """The arguments of `make_expert_groups`, on `world_size` processes."""
        return {
            "ep_size": self.ep_size_in(world_size),
            "stride": self.ep_stride,
            "exchange": self.exchange,
            "chunks": self.dispatch_chunks,
        }


@dataclass(frozen=True, kw_only=True)
class MoERunConfig(ExpertRunConfig, RouterOptions):
    """The settings of a run whose MoE layers are the toolkit's: those of `ExpertRunConfig` and `RouterOptions`, and the
    layers' capacity and memory.

    Raises UserError, with the flag, its value and the remedy, for settings that cannot be, alone or together.
    """

    help_heading: ClassVar[str] = "Capacity and memory of the MoE layers"

    balance_scope: Literal["global", "local", "sequence"] = "global"
    """Average the balance loss over the tokens of the global batch, of each process, or of each sequence."""
    capacity_factor: float | None = None
    """Drop assignments of an expert beyond this many times the mean load; none drops nothing."""
    drop_policy: Literal["probs", "position"] = "probs"
    """Beyond the capacity, drop the assignments with the lowest weights, or those of the latest tokens."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Save memory by computing again in the backward: the experts' hidden activations, or the whole layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.router_options.check(self.experts, self.top_k)
        factor = self.capacity_factor
        fits = factor is None or 0 < factor < math.inf
        require(fits, "capacity_factor", factor, "take a positive number, or none to drop nothing")

    @property
    def router_options(self) -> RouterOptions:
        """The fields that the router of each layer takes."""
        return RouterOptions(**{option.name: getattr(self, option.name) for option in fields(RouterOptions)})


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """Dynamic experts, with --max-experts: growth, and sleep phases with replay, merging and pruning."""

    grow: bool = True
    """Split experts when coming samples are no longer covered: when many have p(target) < 0.5."""
    grow_every: int | None = None
    """Split an expert every so many optimizer steps, too, while a coming or remembered sample is not covered; none:
    only when the coverage check asks for it."""
    new_expert: Literal["split", "fresh"] = "split"
    """Start a new expert with its parent's weights, which changes no output, or with fresh random ones."""
    check_every: int = 25
    """Optimizer steps between coverage checks."""
    check_samples: int = 128
    """Samples per coverage check, over all processes."""
    plateau_threshold: float = 0.1
    """Plateau threshold: tolerated fraction of samples with p(target) < 0.5."""
    cooldown_checks: int = 8
    """Coverage checks without growth after a growth."""
    growths_at_once: int = 1
    """Experts that are split after a shift of the data."""
    merge: bool = True
    """In sleep, merge experts with nearly equal outputs and weights."""
    merge_distance: float = 0.15
    """Maximum normalised distance between the outputs of experts to merge: 0 equal, 1 unrelated."""
    merge_similarity: float = 0.8
    """Minimum cosine between the aligned weights of experts to merge."""
    prune: bool = True
    """In sleep, prune experts with little load."""
    prune_below: float = 0.05
    """Prune experts below this fraction of the mean load since the last sleep."""
    trial_gain: float | None = None
    """In sleep, prune an expert that was split off unless the loss without it is higher by this fraction; each is
    tried once, when it is old enough; none: no trial."""
    min_age: int = 500
    """Minimum age of experts to merge or prune, in optimizer steps."""
    graph: bool = True
    """Leave experts that the same tokens use unmerged, and keep them on one process where possible."""
    sleep: bool = True
    """Have sleep phases: replay, merge, prune, and even out the number of experts per process."""
    sleep_every: int = 1000
    """Optimizer steps between sleep phases."""
    adaptive_sleep: bool = True
    """Sleep more often when there are more than twice the initial experts."""
    min_sleep_every: int = 500
    """Minimum optimizer steps between sleep phases."""
    max_sleep_every: int = 2000
    """Maximum optimizer steps between sleep phases."""
    memory_size: int = 2000
    """Training samples in the replay memory, evenly over classes."""
    replay_steps: int = 40
    """Optimizer steps of replay in a sleep phase."""
    replay_batch_size: int | None = None
    """Samples per replay step, over all processes; none: --batch-size."""
    replay_lr: float = 1e-4
    """Learning rate of replay steps."""
    undo_above: float = 0.02
    """Undo a change in sleep that raises the loss by more than this fraction, and than two standard errors."""
    edge_decay: float = 0.99
    """Factor of the edge weights of the knowledge graph, per epoch and sleep phase."""
    edge_floor: float = 0.1
    """Remove measured edges of the knowledge graph below this weight."""

    def __post_init__(self) -> None:
        require_choices(self, "lifecycle.")
        for name in ("check_every", "check_samples", "growths_at_once", "sleep_every", "memory_size"):
            require(getattr(self, name) >= 1, f"lifecycle.{name}", getattr(self, name), "take one or more")
        for name in ("cooldown_checks", "min_age", "replay_steps"):
            require(getattr(self, name) >= 0, f"lifecycle.{name}", getattr(self, name), "take zero or more")
        for name in ("plateau_threshold", "merge_distance", "merge_similarity", "prune_below"):
            require(
                0 <= getattr(self, name) <= 1, f"lifecycle.{name}", getattr(self, name), "take a fraction from 0 to 1"
            )
        require(0 < self.edge_decay <= 1, "lifecycle.edge_decay", self.edge_decay, "take a fraction above 0, up to 1")
        require(0 <= self.edge_floor < 1, "lifecycle.edge_floor", self.edge_floor, "take a fraction below 1")
        size = self.replay_batch_size
        require(size is None or size >= 1, "lifecycle.replay_batch_size", size, "take one or more")
        require(0 < self.replay_lr < math.inf, "lifecycle.replay_lr", self.replay_lr, "take a positive number")
        steps = self.grow_every
        require(steps is None or steps >= 1, "lifecycle.grow_every", steps, "take one or more, or none")
        gain = self.trial_gain
        fits = gain is None or 0 <= gain < math.inf
        require(fits, "lifecycle.trial_gain", gain, "take zero or more, or none for no trial")
        require(0 <= self.undo_above < math.inf, "lifecycle.undo_above", self.undo_above, "take zero or more")
        fits = 1 <= self.min_sleep_every <= self.max_sleep_every
        remedy = f"take 1 to --lifecycle.max-sleep-every {self.max_sleep_every}"
        require(fits, "lifecycle.min_sleep_every", self.min_sleep_every, remedy)


@dataclass(frozen=True, kw_only=True)
class DynamicRunConfig(MoERunConfig):
    """The settings of a run whose experts may be split, merged and pruned: those of `MoERunConfig`, how many experts
    there may be, and `lifecycle`, which says when they change. They are dynamic where `max_experts` is given.

    Raises UserError, with the flag, its value and the remedy, for settings that cannot be, alone or together.
    """

    help_heading: ClassVar[str] = "Number of dynamic experts"

    max_experts: int | None = None
    """Maximum number of experts per layer: makes them dynamic (split, merged, pruned); none: a fixed number."""
    min_experts: int = 2
    """Minimum number of experts per layer, with --max-experts."""
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.max_experts
        if limit is None:
            return
        require(self.experts >= 1, "experts", self.experts, "take one or more with --max-experts")
        require(limit >= self.experts, "max_experts", limit, f"take --experts {self.experts} or more")
        fits = self.top_k <= self.min_experts <= self.experts
        remedy = f"take --top-k {self.top_k} to --experts {self.experts}"
        require(fits, "min_experts", self.min_experts, remedy)
        for name, required in (("router_groups", 1), ("force_balanced", False), ("spare_slots", 0), ("compile", False)):
            value = getattr(self, name)
            require(value == required, name, value, "leave it out: dynamic experts (--max-experts) do not support it")
        place = self.initial_placement
        require(place is None, "initial_placement", place, "leave it out: --max-experts places experts round-robin")
        require(self.dense_parallel == "ddp", "dense_parallel", self.dense_parallel, "use ddp with --max-experts")

    @property
    def logical_experts(self) -> int:
        return self.max_experts or self.experts
