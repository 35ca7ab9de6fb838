"""The settings of recipes with experts: where they live, how they are chosen, and how they live."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from toolkit.config.router import RouterOptions
from toolkit.config.run import RunConfig, require


@dataclass(frozen=True, kw_only=True)
class ExpertRunConfig(RunConfig):
    """Fields of every recipe with a mixture of experts, whoever wrote its layers."""

    experts: int = 8
    """Experts per layer; 0 trains a dense network of equal active parameters instead."""
    top_k: int = 2
    """Experts that see each token."""
    expert_hidden_size: int = 128
    """Hidden units of an expert."""
    parallel_strategy: Literal["data_parallel", "expert_parallel"] = "expert_parallel"
    """Over several processes: copy the experts to all, or let each process own some."""
    ep_size: int | None = None
    """Processes that share one set of experts; None means as many as divide both processes and experts."""
    planner: str | None = None
    """Move experts between processes while training: swap, lpt, replicate, node_aware, ...; None leaves them."""
    replan_every: int = 200
    """Optimizer steps between plans."""
    spare_slots: int = 0
    """Empty expert slots on each process, which `replicate` fills with copies of experts in demand."""
    initial_placement: Literal["contiguous", "round_robin"] = "contiguous"
    """Place experts in blocks of consecutive ids at the start, or round-robin."""
    guard: bool = True
    """Refuse plans whose gain does not pay for their bytes, by the step times of this run."""
    record_traces: bool = False
    """Write how tokens were routed, forward by forward, to traces.npz in the run's folder, for `toolkit lab`."""
    balance_weight: float = 0.007
    """Weight of the balance loss."""
    z_weight: float = 0.0
    """Weight of the router's z-loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.experts >= 0, "experts", self.experts, "take one or more, or 0 for a dense network")
        require(self.expert_hidden_size >= 1, "expert_hidden_size", self.expert_hidden_size, "take one or more")
        most = max(1, self.experts)
        require(1 <= self.top_k <= most, "top_k", self.top_k, f"take 1 to {most}, the number of --experts")
        for name in ("balance_weight", "z_weight"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "take zero or more")
        require(self.replan_every >= 1, "replan_every", self.replan_every, "take one step or more")
        require(self.spare_slots >= 0, "spare_slots", self.spare_slots, "take zero or more")
        if self.ep_size is not None:
            require(self.ep_size >= 1, "ep_size", self.ep_size, "take one or more")
            copied = self.parallel_strategy == "data_parallel" and self.ep_size > 1
            require(not copied, "ep_size", self.ep_size, "leave it out, or use --parallel-strategy expert_parallel")
            fits = self.ep_size <= most
            require(fits, "ep_size", self.ep_size, f"take at most {most}, the number of --experts")
            if self.num_processes is not None:
                fits = self.num_processes % self.ep_size == 0
                require(fits, "ep_size", self.ep_size, f"it must divide --num-processes {self.num_processes}")

    @property
    def logical_experts(self) -> int:
        """Rows of the router: the experts, and room for more where there may be more."""
        return self.experts

    def ep_size_in(self, world_size: int) -> int:
        """How many of `world_size` processes share one set of experts."""
        if self.parallel_strategy == "data_parallel":
            return 1
        return self.ep_size or math.gcd(world_size, self.logical_experts)


@dataclass(frozen=True, kw_only=True)
class MoERunConfig(ExpertRunConfig, RouterOptions):
    """MoE layers."""

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
    """How a population of experts changes, where `--max-experts` leaves room for that."""

    grow: bool = True
    """Halve an expert when the data are no longer covered."""
    new_expert: Literal["split", "fresh"] = "split"
    """What is born: half of an expert, which changes no output, or an untrained one."""
    check_every: int = 25
    """Optimizer steps between looks at how well coming samples are covered."""
    check_samples: int = 128
    """Coming samples that are looked at, over all processes."""
    plateau_threshold: float = 0.1
    """Fraction of samples with less than even odds that is no reason to grow, once it falls no further."""
    cooldown_checks: int = 8
    """Checks after a growth at which nothing is grown."""
    growths_at_once: int = 1
    """Experts that are halved when the data shift."""
    merge: bool = True
    """Merge experts that became the same, when asleep."""
    merge_distance: float = 0.15
    """Most distance between what two such experts say: 0 is the same, 1 unrelated."""
    merge_similarity: float = 0.8
    """Least cosine between their aligned weights."""
    prune: bool = True
    """End experts that nobody uses, when asleep."""
    prune_below: float = 0.05
    """Nobody uses an expert with less than this fraction of an even share of the tokens since the last sleep."""
    min_age: int = 500
    """Optimizer steps that every expert is given before it may be merged or pruned."""
    graph: bool = True
    """Ask the knowledge graph whom to spare from merging, and who should stay on one process."""
    sleep: bool = True
    """Replay, merge, prune and tidy up from time to time."""
    sleep_every: int = 1000
    """Optimizer steps between sleeps."""
    adaptive_sleep: bool = True
    """Sleep more often when the population has grown."""
    min_sleep_every: int = 500
    """Fewest steps between sleeps."""
    max_sleep_every: int = 2000
    """Most steps between sleeps."""
    memory_size: int = 2000
    """Training samples that are remembered for replay, evenly over classes."""
    replay_steps: int = 40
    """Optimizer steps of replay in a sleep; 0 replays nothing."""
    replay_batch_size: int | None = None
    """Samples per step of replay, over all processes; None takes the batch size."""
    replay_lr: float = 1e-4
    """Learning rate of replay."""
    undo_above: float = 0.02
    """A change that raises the loss by more than this fraction is undone."""
    edge_decay: float = 0.99
    """What the weights of the knowledge graph's edges are multiplied by each epoch."""
    edge_floor: float = 0.1
    """A measured edge with less weight than this is forgotten."""

    def __post_init__(self) -> None:
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
        require(0 <= self.undo_above < math.inf, "lifecycle.undo_above", self.undo_above, "take zero or more")
        fits = 1 <= self.min_sleep_every <= self.max_sleep_every
        remedy = f"take 1 to --lifecycle.max-sleep-every {self.max_sleep_every}"
        require(fits, "lifecycle.min_sleep_every", self.min_sleep_every, remedy)


@dataclass(frozen=True, kw_only=True)
class DynamicRunConfig(MoERunConfig):
    """Fields of a recipe whose experts may be born and end."""

    max_experts: int | None = None
    """Room for so many experts, which may then be grown, merged and pruned; None keeps --experts for ever."""
    min_experts: int = 2
    """Experts that are left alive, where they may end."""
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        room = self.max_experts
        if room is None:
            return
        require(self.experts >= 1, "experts", self.experts, "take one or more with --max-experts")
        require(room >= self.experts, "max_experts", room, f"take --experts {self.experts} or more")
        fits = self.top_k <= self.min_experts <= self.experts
        remedy = f"take --top-k {self.top_k} to --experts {self.experts}"
        require(fits, "min_experts", self.min_experts, remedy)
        for name, plain in (("router_groups", 1), ("force_balanced", False), ("spare_slots", 0), ("compile", False)):
            value = getattr(self, name)
            require(value == plain, name, value, "leave it out, or --max-experts: experts that live have no such thing")
        require(self.dense_parallel == "ddp", "dense_parallel", self.dense_parallel, "use ddp with --max-experts")

    @property
    def logical_experts(self) -> int:
        return self.max_experts or self.experts
