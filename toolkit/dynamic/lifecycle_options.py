"""The settings of a run with dynamic experts. Names and descriptions are those of a recipe's flags."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.errors import require
from toolkit.experts.options import Fraction, Options
from toolkit.run.config.experts import MoERunConfig

INTERVALS = ("grow_every", "min_age", "sleep_every", "min_sleep_every")
"""Fields that `LifecycleOptions.within` shortens."""


class LifecycleOptions(Options):
    """Dynamic experts: growth, and sleep phases with replay, merging and pruning."""

    switch: ClassVar[str] = "max_experts"

    min_experts: PositiveInt = 2
    """Minimum number of experts per layer."""
    check_every: PositiveInt | None = 25
    """Optimizer steps between coverage checks, which split experts when many coming samples have p(target) < 0.5; none:
    no growth."""
    grow_every: PositiveInt | None = None
    """Split an expert every so many optimizer steps, too, while a coming or remembered sample is not covered. Default:
    only when the coverage check asks for it."""
    check_samples: PositiveInt = 128
    """Samples per coverage check, over all processes."""
    plateau_threshold: Fraction = 0.1
    """Plateau threshold: tolerated fraction of samples with p(target) < 0.5."""
    cooldown_checks: NonNegativeInt = 8
    """Coverage checks without growth after a growth."""
    merge_distance: Fraction | None = 0.15
    """Maximum normalised distance between the outputs of experts to merge in sleep: 0 equal, 1 unrelated; none: no
    merging."""
    merge_similarity: Fraction = 0.8
    """Minimum cosine between the aligned weights of experts to merge."""
    prune_below: Fraction = 0.05
    """Prune experts in sleep below this fraction of the mean load since the last sleep; 0: no pruning."""
    trial_gain: NonNegativeFloat | None = None
    """In sleep, prune an expert that was split off unless the loss without it is higher by this fraction; each is
    tried once, when it is old enough. Default: no trial."""
    min_age: NonNegativeInt = 500
    """Minimum age of experts to merge or prune, in optimizer steps."""
    sleep_every: PositiveInt | None = 1000
    """Optimizer steps between sleep phases: replay, merge, prune, and even out the number of experts per process; none:
    no sleep."""
    min_sleep_every: PositiveInt | None = 500
    """Minimum optimizer steps between sleep phases, which are more frequent with more than twice the initial experts;
    none: always `sleep_every`."""
    memory_size: PositiveInt = 2000
    """Training samples in the replay memory, evenly over classes."""
    replay_steps: NonNegativeInt = 40
    """Optimizer steps of replay in a sleep phase, of the run's batch size."""
    replay_lr: PositiveFloat = 1e-4
    """Learning rate of replay steps."""
    undo_above: NonNegativeFloat = 0.02
    """Undo a change in sleep that raises the loss by more than this fraction, and than two standard errors."""
    within: PositiveInt | None = None
    """In a run of fewer optimizer steps, shorten grow_every, min_age, sleep_every and min_sleep_every in proportion.
    Default: the same intervals in every run."""

    def in_run_of(self, steps: int) -> LifecycleOptions:
        """Return the options for a run of `steps` optimizer steps, with intervals shortened by `within`."""
        if self.within is None or steps >= self.within:
            return self
        share = steps / self.within
        shorter = {name: max(1, round(share * value)) for name in INTERVALS if (value := getattr(self, name))}
        return self.replace(within=None, **shorter)


class DynamicRunConfig(MoERunConfig):
    """The settings of a run whose experts are split, merged and pruned if `max_experts` is given."""

    max_experts: PositiveInt | None = None
    """Maximum number of experts per layer: makes them dynamic (split, merged, pruned). Default: a fixed number."""
    lifecycle: LifecycleOptions = LifecycleOptions()

    def check_together(self) -> None:
        super().check_together()
        if self.max_experts is None:
            return
        for name, required in (("spare_slots", 0), ("compile", False), ("dense_parallel", "ddp")):
            value = getattr(self, name)
            require(value == required, name, value, "dynamic experts (max_experts) do not support it, leave it out")

    @property
    def logical_experts(self) -> int:
        return self.max_experts or self.experts
