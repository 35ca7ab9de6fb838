"""The callback that moves experts between ranks while a `Trainer` trains."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.experts.layer.moe_layer import experts_on_ranks
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


class Replan(Callback):
    """Moves experts between ranks while training, as `options` say.

    Records since the last log step `moe/migrated_experts`, `moe/migration_bytes`, `moe/migration_optimizer_bytes`
    (included in the bytes), `moe/plans_refused` and, for this rank, `perf/planner_ms` and `perf/migration_ms`;
    over the whole run `moe/migration_bytes_per_step`; and `moe/predicted_imbalance`, which the current plans predicted,
    mean over layers that have a plan, to compare with `moe/rank_imbalance_of_sum`. `moe/placement/<layer>`, the logical
    experts on each rank, is recorded at the first log step and at each log step after a change. The results have the
    sums over the run, the steps of the first and the last move, the placement before the first move, and the load of
    the busiest rank over the mean in the window before the first move and in the windows after the last move.
    """

    def __init__(self, model: nn.Module, options: ReplanOptions):
        self._model = model
        self._placements: dict[str, list[list[int]]] = {}
        """Last recorded placement by layer."""
        self.replanner = Replanner(expert_stacks(model), options)
        self._experts = self._bytes = self._optimizer_bytes = 0
        self._refused = self._refused_before = 0
        """Rejected plans since the last log step, and of this process up to the last step."""
        self._predicted: dict[str, float] = {}
        self._windows = 0
        """Imbalances since the last move; `imbalance_after_moves` of the results is their mean."""
        self._seconds = (0.0, 0.0)
        """Seconds of planning and of migrating up to the last log step, in this process."""

    def on_step_end(self, trainer: Trainer) -> None:
        due = trainer.state.step % self.replanner.options.every == 0
        before = experts_on_ranks(self._model) if due and "first_move_step" not in trainer.results else {}
        moved = self.replanner.after_step(trainer.state.step, trainer.optimizer)
        self._refused += self.replanner.plans_refused - self._refused_before
        self._refused_before = self.replanner.plans_refused
        self._experts += sum(migration.report.cost.experts for migration in moved)
        self._bytes += sum(migration.report.cost.bytes for migration in moved)
        self._optimizer_bytes += sum(migration.report.cost.optimizer_bytes for migration in moved)
        self._predicted |= {migration.layer: migration.predicted_imbalance for migration in moved}
        if due:
            self._note_moves(trainer, before, moved=bool(moved))
        if trainer.at_log_step:
            trainer.record("moe/migrated_experts", self._experts)
            trainer.record("moe/migration_bytes", self._bytes)
            trainer.record("moe/migration_optimizer_bytes", self._optimizer_bytes)
            trainer.record("moe/plans_refused", self._refused)
            for layer, experts in experts_on_ranks(self._model).items():
                if experts != self._placements.get(layer):
                    trainer.record(f"moe/placement/{layer}", experts)
                    self._placements[layer] = experts
            if self._predicted:
                trainer.record("moe/predicted_imbalance", fmean(self._predicted.values()))
            seconds = self._seconds
            self._seconds = (
                self.replanner.planner_seconds,
                sum(migration.report.seconds for migration in self.replanner.migrations),
            )
            trainer.record("perf/planner_ms", 1e3 * (self._seconds[0] - seconds[0]))
            trainer.record("perf/migration_ms", 1e3 * (self._seconds[1] - seconds[1]))
            sums = {"migrated_experts": self._experts, "migration_bytes": self._bytes, "plans_refused": self._refused}
            for name, value in sums.items():
                trainer.results[name] = trainer.results.get(name, 0) + value
            amortised = trainer.results["migration_bytes"] / trainer.state.step
            trainer.record("moe/migration_bytes_per_step", amortised)
            self._experts = self._bytes = self._optimizer_bytes = self._refused = 0

    def _note_moves(self, trainer: Trainer, before: dict[str, list[list[int]]], *, moved: bool) -> None:
        """Put into the results when experts moved, the placement `before` the first move, and the imbalance of ranks
        before and after the moves."""
        results, window = trainer.results, self.replanner.window_imbalance
        if "last_move_step" in results:
            self._windows += 1
            mean = results["imbalance_after_moves"]  # before the first window, what the plans predicted
            results["imbalance_after_moves"] = mean + (window - mean) / self._windows
        if moved:
            if "first_move_step" not in results:
                results |= {"first_move_step": trainer.state.step, "imbalance_before_moves": window}
                results["placement_before_moves"] = before
            self._windows = 0
            results |= {"last_move_step": trainer.state.step, "imbalance_after_moves": fmean(self._predicted.values())}

    def state_dict(self) -> dict[str, Any]:
        return {
            "replanner": self.replanner.state_dict(),
            "experts": self._experts,
            "bytes": self._bytes,
            "optimizer_bytes": self._optimizer_bytes,
            "refused": self._refused,
            "predicted": self._predicted,
            "windows": self._windows,
            "placements": self._placements,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replanner.load_state_dict(state["replanner"])
        self._experts = state["experts"]
        self._bytes = state["bytes"]
        self._optimizer_bytes = state["optimizer_bytes"]
        self._predicted = dict(state["predicted"])
        self._refused = state["refused"]
        self._windows = state["windows"]
        self._placements = state["placements"]
