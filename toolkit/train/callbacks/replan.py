"""The callback that records how experts move between ranks while a `Trainer` trains."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer


class Replan(Callback):
    """Has the trainer's `ExpertSync` move experts between ranks after steps, as `options` say, and records the moves.

    Records since the last log step `moe/migrated_experts`, `moe/migration_bytes`, `moe/migration_optimizer_bytes`
    (included in the bytes), `moe/plans_refused` and, for this rank, `perf/planner_ms` and `perf/migration_ms`;
    over the whole run `moe/migration_bytes_per_step`; and `moe/predicted_imbalance`, which the current plans predicted,
    mean over layers that have a plan, to compare with `moe/rank_imbalance_of_sum`. `moe/placement/<layer>`, the logical
    experts on each rank, is recorded at the first log step and at each log step after a change. The results have the
    sums over the run, the steps of the first and the last move, the placement before the first move, and the load of
    the busiest rank over the mean in the window before the first move and in the windows after the last move.
    """

    def __init__(self, experts: Experts, options: ReplanOptions):
        self.experts, self.replanner = experts, Replanner(experts.stacks, options)
        self._counts = Counter(migrated_experts=0, migration_bytes=0, migration_optimizer_bytes=0, plans_refused=0)
        """Since the last log step."""
        self._read = (0, 0)
        """Migrations and rejected plans of this process that are in `_counts`, or were in a log step."""
        self._placements: dict[str, list[list[int]]] = {}
        """Last recorded placement by layer."""
        self._before: dict[str, list[list[int]]] = {}
        """Placement before the first move."""
        self._predicted: dict[str, float] = {}
        self._windows = 0
        """Imbalances since the last move; `imbalance_after_moves` of the results is their mean."""
        self._seconds = (0.0, 0.0)
        """Seconds of planning and of migrating up to the last log step, in this process."""

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.sync.rebalance = self.replanner.after_step

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        if self._is_due(trainer.state.step + 1) and "first_move_step" not in trainer.results:
            self._before = self.experts.on_ranks()

    def on_step_end(self, trainer: Trainer) -> None:
        if self._is_due(trainer.state.step):
            self._count(trainer.state.step, trainer.results)
        if not trainer.at_log_step:
            return
        for name, value in self._counts.items():
            trainer.record(f"moe/{name}", value)
            if name != "migration_optimizer_bytes":
                trainer.results[name] = trainer.results.get(name, 0) + value
            self._counts[name] = 0
        trainer.record("moe/migration_bytes_per_step", trainer.results["migration_bytes"] / trainer.state.step)
        for layer, experts in self.experts.on_ranks().items():
            if experts != self._placements.get(layer):
                trainer.record(f"moe/placement/{layer}", experts)
                self._placements[layer] = experts
        if self._predicted:
            trainer.record("moe/predicted_imbalance", fmean(self._predicted.values()))
        planning, migrating = self._seconds
        migrations = sum(migration.report.seconds for migration in self.replanner.migrations)
        self._seconds = self.replanner.planner_seconds, migrations
        trainer.record("perf/planner_ms", 1e3 * (self._seconds[0] - planning))
        trainer.record("perf/migration_ms", 1e3 * (self._seconds[1] - migrating))

    def _is_due(self, step: int) -> bool:
        return step % self.replanner.options.every == 0

    def _count(self, step: int, results: dict[str, Any]) -> None:
        """Count the moves after `step`, and put their steps and the imbalance of ranks around them into the results."""
        (read, refused), window = self._read, self.replanner.window_imbalance
        moved = self.replanner.migrations[read:]
        self._read = len(self.replanner.migrations), self.replanner.plans_refused
        self._counts["plans_refused"] += self._read[1] - refused
        for migration in moved:
            cost = migration.report.cost
            self._counts["migrated_experts"] += cost.experts
            self._counts["migration_bytes"] += cost.bytes
            self._counts["migration_optimizer_bytes"] += cost.optimizer_bytes
            self._predicted[migration.layer] = migration.predicted_imbalance
        if "last_move_step" in results:
            self._windows += 1
            mean = results["imbalance_after_moves"]  # before the first window, what the plans predicted
            results["imbalance_after_moves"] = mean + (window - mean) / self._windows
        if moved:
            if "first_move_step" not in results:
                results |= {"first_move_step": step, "imbalance_before_moves": window}
                results["placement_before_moves"] = self._before
            self._windows = 0
            results |= {"last_move_step": step, "imbalance_after_moves": fmean(self._predicted.values())}

    def state_dict(self) -> dict[str, Any]:
        return {
            "replanner": self.replanner.state_dict(),
            "counts": dict(self._counts),
            "predicted": self._predicted,
            "windows": self._windows,
            "placements": self._placements,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replanner.load_state_dict(state["replanner"])
        self._counts = Counter(state["counts"])
        self._predicted = dict(state["predicted"])
        self._windows = state["windows"]
        self._placements = state["placements"]
