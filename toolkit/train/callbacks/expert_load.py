"""The callback that records balance and traffic at each log step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.expert_records import ExpertRecords
from toolkit.experts.layer.losses import balance_weight_of
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


BUSY, IDLE = 2.0, 0.1
"""Above and below these multiples of the mean load over an epoch an expert's load is said to be uneven."""
FEW = 100
"""Assignments per expert that say too little."""


class ExpertLoad(Callback):
    """Records the load of experts and ranks since the last log step, with one reduction per log step.

    `moe/load/<layer>` is the fraction of assignments of each expert and, with expert parallelism,
    `moe/rank_load/<layer>` the fraction of rows that each rank's experts compute. The metrics over all layers are from
    `toolkit.experts.routing.metrics`: `expert_metrics` always, and with expert parallelism `balance_metrics`,
    `traffic_metrics`, `deduplicated_metrics` and `replica_metrics`. Results are over the last epoch,
    or the steps of a run that ends within its first one, of experts that were active throughout: `min_expert_load`, the
    smallest fraction in any layer, and `expert_load`, the layer with the largest fraction and the fractions of its
    experts. If the load was uneven, `expert_load_notice` describes it for the summary.
    """

    def on_init(self, trainer: Trainer) -> None:
        self.records = ExpertRecords(trainer.experts)
        self._load_before_LE = self.records.load_LE
        """`load_LE` of the records when this epoch began."""
        self._stayed_active_LE = self.records.forwards.active()
        """Experts that were active when this epoch began."""

    def on_fit_start(self, trainer: Trainer) -> None:
        self.records.began = self.records.began or trainer.state.step

    def on_step_end(self, trainer: Trainer) -> None:
        self.records.fold_when_many()
        step, per_epoch = trainer.state.step, trainer.batches.steps_per_epoch
        ends_epoch = step % per_epoch == 0
        if ends_epoch or step == trainer.max_steps < per_epoch:
            self.records.fold()
            active_LE = self.records.forwards.active()
            self._sum_up(trainer, self.records.load_LE - self._load_before_LE, active_LE & self._stayed_active_LE)
            if ends_epoch:
                self._load_before_LE, self._stayed_active_LE = self.records.load_LE, active_LE
        if trainer.at_log_step:
            for name, value in self.records.read_loads(step).items():
                trainer.record(name, value)

    def _sum_up(self, trainer: Trainer, load_LE: NDArray[Any], whole_LE: NDArray[Any]) -> None:
        """Set the results of an epoch, of the experts in `whole_LE`."""
        if load_LE.any(1).all():
            share_LE = load_LE / load_LE.sum(1, keepdims=True)
            busiest = int((share_LE * whole_LE).max(1).argmax())
            trainer.results["min_expert_load"] = float(share_LE[whole_LE].min(initial=1))
            trainer.results["expert_load"] = {
                self.records.names[busiest]: share_LE[busiest, whole_LE[busiest]].round(4).tolist()
            }
        uneven = {}
        for layer, load_E, whole_E in zip(self.records.names, load_LE, whole_LE, strict=True):
            if whole_E.sum() > 1 and load_E[whole_E].sum() >= FEW * whole_E.sum():
                times_mean_E = load_E[whole_E] / load_E[whole_E].mean()
                most, least = times_mean_E.max(), times_mean_E.min()
                if most > BUSY or least < IDLE:
                    said = f"the busiest expert has {most:.1f} times the mean load, the least busy {least:.2f} times"
                    uneven[most - least] = f"{layer}: {said}; {self._remedy(trainer)}"
        trainer.results.pop("expert_load_notice", None)
        if uneven:
            trainer.results["expert_load_notice"] = uneven[max(uneven)]

    def _remedy(self, trainer: Trainer) -> str:
        """Returns what to change, in words, of what this run has."""
        config: Any = trainer.run.config
        if getattr(config, "freeze_router", False):
            moves = self.records.stacks[0].groups.ep_size > 1 and not config.replan.planner
            elsewhere = ", replan.planner='swap' moves experts between processes" if moves else ""
            return f"routers are frozen: freeze_router=False trains them{elsewhere}"
        if getattr(config, "balance", "loss") != "loss":
            return "use balance='loss'"
        weight_of_loss = balance_weight_of(trainer.raw_model.modules())
        if weight_of_loss and hasattr(config, "balance_weight"):
            weight = f"{weight_of_loss:.2g}"
            return f"the balance loss has the weight {weight}: take more than balance_weight={config.balance_weight:g}"
        return "give the task a RouterPenalty with a balance_weight"

    def state_dict(self) -> dict[str, Any]:
        """A collective."""
        self.records.fold()
        return {
            **self.records.state_dict(),
            "epoch_load": (self.records.load_LE - self._load_before_LE).tolist(),
            "stayed_active": self._stayed_active_LE.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.records.load_state_dict(state)
        self._load_before_LE = self.records.load_LE - np.array(state["epoch_load"], dtype=np.int64)
        self._stayed_active_LE = np.array(state["stayed_active"], dtype=bool)
