"""When dynamic experts are split, merged and pruned. Names and descriptions are those of a recipe's flags."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.errors import require
from toolkit.experts.options import Fraction, Options


class LifecycleOptions(Options):
    """Dynamic experts: growth, and sleep phases with replay, merging and pruning."""

    grow: bool = True
    """Split experts when coming samples are no longer covered: when many have p(target) < 0.5."""
    grow_every: PositiveInt | None = None
    """Split an expert every so many optimizer steps, too, while a coming or remembered sample is not covered; none:
    only when the coverage check asks for it."""
    check_every: PositiveInt = 25
    """Optimizer steps between coverage checks."""
    check_samples: PositiveInt = 128
    """Samples per coverage check, over all processes."""
    plateau_threshold: Fraction = 0.1
    """Plateau threshold: tolerated fraction of samples with p(target) < 0.5."""
    cooldown_checks: NonNegativeInt = 8
    """Coverage checks without growth after a growth."""
    merge: bool = True
    """In sleep, merge experts with nearly equal outputs and weights."""
    merge_distance: Fraction = 0.15
    """Maximum normalised distance between the outputs of experts to merge: 0 equal, 1 unrelated."""
    merge_similarity: Fraction = 0.8
    """Minimum cosine between the aligned weights of experts to merge."""
    prune: bool = True
    """In sleep, prune experts with little load."""
    prune_below: Fraction = 0.05
    """Prune experts below this fraction of the mean load since the last sleep."""
    trial_gain: NonNegativeFloat | None = None
    """In sleep, prune an expert that was split off unless the loss without it is higher by this fraction; each is
    tried once, when it is old enough; none: no trial."""
    min_age: NonNegativeInt = 500
    """Minimum age of experts to merge or prune, in optimizer steps."""
    graph: bool = True
    """Leave experts that the same tokens use unmerged, and keep them on one process where possible."""
    sleep: bool = True
    """Have sleep phases: replay, merge, prune, and even out the number of experts per process."""
    sleep_every: PositiveInt = 1000
    """Optimizer steps between sleep phases."""
    adaptive_sleep: bool = True
    """Sleep more often when there are more than twice the initial experts."""
    min_sleep_every: PositiveInt = 500
    """Minimum optimizer steps between sleep phases."""
    max_sleep_every: PositiveInt = 2000
    """Maximum optimizer steps between sleep phases."""
    memory_size: PositiveInt = 2000
    """Training samples in the replay memory, evenly over classes."""
    replay_steps: NonNegativeInt = 40
    """Optimizer steps of replay in a sleep phase, of the run's batch size."""
    replay_lr: PositiveFloat = 1e-4
    """Learning rate of replay steps."""
    undo_above: NonNegativeFloat = 0.02
    """Undo a change in sleep that raises the loss by more than this fraction, and than two standard errors."""

    def check_together(self) -> None:
        super().check_together()
        fits = self.min_sleep_every <= self.max_sleep_every
        remedy = f"take at most max_sleep_every={self.max_sleep_every}"
        require(fits, "min_sleep_every", self.min_sleep_every, remedy)

    def idle(self) -> dict[str, str]:
        found = super().idle()
        if not self.grow:
            names = ("grow_every", "check_every", "check_samples", "plateau_threshold", "cooldown_checks")
            found |= dict.fromkeys(names, "with grow=False")
        if not self.merge:
            found |= dict.fromkeys(("merge_distance", "merge_similarity"), "with merge=False")
        if not self.prune:
            found["prune_below"] = "with prune=False"
        if not self.sleep:
            asleep = (
                "merge",
                "merge_distance",
                "merge_similarity",
                "prune",
                "prune_below",
                "trial_gain",
                "sleep_every",
            )
            more = ("adaptive_sleep", "min_sleep_every", "max_sleep_every", "replay_steps", "replay_lr", "undo_above")
            found |= dict.fromkeys((*asleep, *more), "with sleep=False")
        return found
