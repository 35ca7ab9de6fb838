"""The callback that records how experts move between ranks while a `Trainer` trains."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from toolkit.experts.expert_records import PlacementChanges
from toolkit.experts.moving.replan import Decision, Replanner
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer

IN_RESULTS = ("migrated_experts", "migration_bytes", "plans_refused")
"""Metrics whose sums over the run are results."""


class Replan(Callback):
    """Has the trainer's `ExpertSync` move experts between ranks after steps, as `options` say, and records the moves.

    `docs/reference/metrics.md` lists the metrics. The results have the sums over the run, the steps of the first and
    the last move, the placement before the first move, and the load of the busiest rank over the mean in the window
    before the first move and in the windows after the last move.
    """

    def __init__(self, options: ReplanOptions):
        self.options = options
        self._before: dict[str, list[list[int]]] = {}
        """Placement before the first move."""
        self._windows = 0
        """Imbalances since the last move; `imbalance_after_moves` of the results is their mean."""

    def on_init(self, trainer: Trainer) -> None:
        self.replanner = Replanner(trainer.experts.stacks, self.options)
        self._placements = PlacementChanges(trainer.experts)

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.sync.rebalance = self.replanner.after_step

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        is_due = (trainer.state.step + 1) % self.options.every == 0
        if is_due and "first_move_step" not in trainer.results:
            self._before = trainer.experts.on_ranks()

    def on_step_end(self, trainer: Trainer) -> None:
        if self.replanner.decision.step == trainer.state.step:
            self._add(self.replanner.decision, trainer.results)
        if not trainer.at_log_step:
            return
        sums = self.replanner.read()
        for name in IN_RESULTS:
            trainer.results[name] = trainer.results.get(name, 0) + sums[f"moe/{name}"]
        sums["moe/migration_bytes_per_step"] = trainer.results["migration_bytes"] / trainer.state.step
        for name, value in {**sums, **self._placements.read()}.items():
            trainer.record(name, value)

    def _add(self, decision: Decision, results: dict[str, Any]) -> None:
        """Put the steps of moves and the imbalance around them into the results."""
        if "last_move_step" in results:
            self._windows += 1
            mean = results["imbalance_after_moves"]  # before the first window, what the plans predicted
            results["imbalance_after_moves"] = mean + (decision.imbalance - mean) / self._windows
        if decision.migrations:
            if "first_move_step" not in results:
                results |= {
                    "first_move_step": decision.step,
                    "imbalance_before_moves": decision.imbalance,
                    "placement_before_moves": self._before,
                }
            self._windows = 0
            results |= {
                "last_move_step": decision.step,
                "imbalance_after_moves": fmean(self.replanner.predicted.values()),
            }

    def state_dict(self) -> dict[str, Any]:
        return {
            "replanner": self.replanner.state_dict(),
            "sums": dict(self.replanner.sums),
            "windows": self._windows,
            "placements": self._placements.last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replanner.load_state_dict(state["replanner"])
        self.replanner.sums, self._windows = dict(state["sums"]), state["windows"]
        self._placements.last = state["placements"]
