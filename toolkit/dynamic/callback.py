"""The callback that changes experts during training: when to grow, when to sleep, and which changes to keep.

All ranks measure the same numbers and so make the same changes at the same steps, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from toolkit.dynamic.coverage import CoverageAlarm, Lack
from toolkit.dynamic.graph import KnowledgeGraph
from toolkit.dynamic.lifecycle_options import LifecycleOptions
from toolkit.dynamic.plans import (
    Merge,
    Pair,
    Plan,
    Prune,
    plan_growth,
    plan_merges,
    plan_placement,
    plan_prunes,
    plan_sleep,
)
from toolkit.dynamic.probe import Probe, probe_samples
from toolkit.dynamic.roster import EventKind, ExpertRoster, LifecycleEvent
from toolkit.dynamic.similarity import compare_experts
from toolkit.dynamic.surgery import DynamicExperts
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.routing_log import take_loads
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel.rows_in_use import RowsInUse
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.expert_balance import WholeStepBalance

if TYPE_CHECKING:
    from toolkit.data.replay_memory import ReplayMemory
    from toolkit.dynamic.report import LifecycleReport
    from toolkit.train.task import Batch
    from toolkit.train.trainer import Trainer

PROBE_SAMPLES = 256
"""Training samples to evaluate a change on, and the same number from the replay buffer."""
COUNTED: tuple[EventKind, ...] = ("grow", "merge", "prune", "kept", "sleep", "undone")


class ScoresSamples(Protocol):
    """A task with a loss per sample."""

    def sample_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """(N): the loss of each sample, in nats."""
        ...


class Lifecycle(Callback):
    """Callback that splits experts if coming samples are not covered, and replays, merges and prunes in sleep phases.

    Acts on the layers of `model` that `make_dynamic_moe` made, and does nothing without any. With `knowledge`, experts
    that share many tokens are not merged, and stay on one rank if possible.

    The loss on recent and replayed samples is measured before and after each change of a sleep phase. The change is
    undone if the loss rose by more than `config.undo_above`, and by more than two standard errors of the rise.

    Records at each log step `lifecycle/experts` (active, mean over layers) and the last values of
    `lifecycle/uncovered`, `lifecycle/loss_before_sleep` and `lifecycle/loss_after_sleep`. Adds to the run's results
    `active_experts` (of the layer with the most) and the counts `lifecycle_grow`, `_merge`, `_prune`, `_kept`, `_sleep`
    and `_undone`.

    Args:
        model: The model before it is prepared.
        task: Gives the loss of each sample.
        memory: The samples to replay, which the callback `Remember` stores.
        config: When to grow and to sleep, and which changes to make.
    """

    def __init__(
        self,
        model: nn.Module,
        task: ScoresSamples,
        memory: ReplayMemory,
        config: LifecycleOptions,
    ):
        self.experts = DynamicExperts(model)
        self.layers = self.experts.layers
        self.task, self.memory, self.config = task, memory, config
        self.min_experts = max([config.min_experts, *(layer.router.top_k for layer in self.layers.values())])
        self._balance: WholeStepBalance | None = None
        """Gives replay the balance loss of the global batch, as other steps have."""
        self.knowledge: LifecycleReport | None = None
        """Knowledge graphs, equal on all ranks."""
        self.alarm = CoverageAlarm(tolerated=config.plateau_threshold, cooldown=config.cooldown_checks)
        self._initial = self.experts.most_active()
        self.next_sleep = self._steps_until_sleep()
        self._cursors = {name: layer.expert_stack.log.cursor() for name, layer in self.layers.items()}
        """The assignments since the last sleep."""
        self._readings: dict[str, float] = {}
        self._rows: RowsInUse | None = None
        self._routers_known = False
        """Says whether the routers were refreshed since weights were loaded."""

    @property
    def rosters(self) -> Mapping[str, ExpertRoster]:
        return self.experts.rosters

    @property
    def history(self) -> list[LifecycleEvent]:
        return self.experts.history

    # --- callback hooks -----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer) -> None:
        given, self.config = self.config, self.config.in_run_of(trainer.max_steps)
        if self.config is not given:
            if trainer.state.step == 0:
                self.next_sleep = self._steps_until_sleep()
            trainer.run.print(
                f"lifecycle: grow_every={self.config.grow_every}, sleep_every={self.config.sleep_every}, "
                f"because the run has {trainer.max_steps:,} steps."
            )
        self._rows = self.experts.rows_in_use(trainer.model, trainer.optimizer)
        self._balance = next((each for each in trainer.callbacks if isinstance(each, WholeStepBalance)), None)

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        if not self._routers_known:
            self.experts.refresh_routers()
            self._routers_known = True

    def on_before_forward(self, trainer: Trainer) -> None:  # noqa: ARG002
        self.experts.mark_rows_in_use()
        if self._rows is not None:
            self._rows.narrow()

    def on_step_end(self, trainer: Trainer) -> None:
        self._show_all_rows()  # if the step was skipped
        if not self.layers:
            return
        step = trainer.state.step
        if self.config.check_every and step % self.config.check_every == 0:
            self.check(trainer)
        if self.config.grow_every and step % self.config.grow_every == 0:
            self.grow(trainer, "schedule")
        if self.config.sleep_every and step >= self.next_sleep:
            self.sleep(trainer)
        elif self.config.sleep_every and step == trainer.max_steps:
            self.judge(trainer)
        if trainer.at_log_step:
            active = [len(roster) for roster in self.rosters.values()]
            trainer.record("lifecycle/experts", sum(active) / len(active))
            for name, value in self._readings.items():
                trainer.record(f"lifecycle/{name}", value)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        self._show_all_rows(for_good=True)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._show_all_rows(for_good=True)
        if not self.layers:
            return
        counts = {f"lifecycle_{kind}": sum(event.kind == kind for event in self.history) for kind in COUNTED}
        trainer.results |= {"active_experts": self.experts.most_active(), **counts}

    def _show_all_rows(self, *, for_good: bool = False) -> None:
        if self._rows is not None:
            self._rows.remove() if for_good else self._rows.widen()

    # --- growth -------------------------------------------------------------------------------------------------

    def check(self, trainer: Trainer) -> None:
        """Measures how many coming samples are not covered, and grows if the alarm says so."""
        rows = next_rows(trainer, self.config.check_samples)
        probe = self._probe(trainer, rows, list(self.layers.values()))
        self._readings["uncovered"] = probe.uncovered
        lack = self.alarm.observe(probe.uncovered, probe.samples)
        if lack is not None:
            self.grow(trainer, lack)

    def grow(self, trainer: Trainer, lack: Lack) -> None:
        """Splits in each layer the expert with the most routing weight of uncovered tokens; but none so late that the
        new one will not be old enough to be judged before the run ends."""
        if self.config.sleep_every and trainer.max_steps - trainer.state.step < self.config.min_age:
            return
        rows = self._with_remembered(trainer, next_rows(trainer, PROBE_SAMPLES), "grow")
        probe = self._probe(trainer, rows, list(self.layers.values()))
        for index, (name, layer) in enumerate(self.layers.items()):
            roster = self.rosters[name]
            weight_E = probe.uncovered_weight(index, roster.logical_experts).tolist()
            uncovered = {record.uid: weight_E[record.logical_id] for record in roster.active}
            plan = plan_growth(roster, layer.placement, uncovered)
            if plan is not None:
                plane = probe.hyperplane(index, roster.logical_id_of(plan.parent))
                self._carry_out(trainer, name, plan, plane=plane, lack=lack)

    # --- sleep --------------------------------------------------------------------------------------------------

    def sleep(self, trainer: Trainer) -> None:
        """Replays, merges, prunes, evens out the ranks, and schedules the next sleep."""
        step = trainer.state.step
        events = len(self.history)
        loads = take_loads(list(self._cursors.values()))
        if self.knowledge is not None:
            self.knowledge.observe(step)
        rows = self._with_remembered(trainer, last_rows(trainer, PROBE_SAMPLES), "sleep")
        before = now = self._probe(trainer, rows)
        if self.config.replay_steps and len(self.memory):
            now = self._attempt(trainer, rows, now, "", partial(self._replay, trainer))
        now = self._remove(trainer, rows, now, loads)
        for name, layer in self.layers.items():
            roster = self.rosters[name]
            graph = self._graph(name)
            together_EE = None if graph is None else graph.affinity(roster.uids_of_logical)
            placement = plan_placement(roster, layer.placement, together_EE)
            if placement != layer.placement:
                migrate(layer.expert_stack, placement, trainer.optimizer)
        self._readings |= {"loss_before_sleep": before.loss, "loss_after_sleep": now.loss}
        changes = [event.kind for event in self.history[events:]]
        detail = {"before": before.loss, "after": now.loss, "changes": changes}
        self.history.append(LifecycleEvent(step, "", "sleep", (), detail))
        self.next_sleep = step + self._steps_until_sleep()

    def judge(self, trainer: Trainer) -> None:
        """Merges and prunes at the end of a run, when no sleep follows that would."""
        loads = take_loads(list(self._cursors.values()))
        rows = self._with_remembered(trainer, last_rows(trainer, PROBE_SAMPLES), "sleep")
        self._remove(trainer, rows, self._probe(trainer, rows), loads)

    def _remove(self, trainer: Trainer, rows: Tensor, now: Probe, loads: Sequence[Tensor]) -> Probe:
        """Merges and prunes, given the loads since the last sleep; returns the losses afterwards."""
        for name, load_E in zip(self.layers, loads, strict=True):
            for plan in self._removals(trainer, name, rows, load_E.tolist()):
                now = self._attempt(trainer, rows, now, name, partial(self._carry_out, trainer, name, plan))
            if self.config.trial_gain is not None:
                now = self._try_without(trainer, name, rows, now, self.config.trial_gain)
        return now

    def _steps_until_sleep(self) -> int:
        every, least = self.config.sleep_every, self.config.min_sleep_every
        return 0 if every is None else plan_sleep(self.experts.most_active(), self._initial, every=every, least=least)

    def _attempt(self, trainer: Trainer, rows: Tensor, before: Probe, layer: str, change: Callable[[], None]) -> Probe:
        """Makes a change, and undoes it if it made the losses worse; returns the losses afterwards."""
        undo = self.experts.undo_point(trainer.optimizer)
        change()
        after = self._probe(trainer, rows)
        if not after.is_worse(before, self.config.undo_above):
            return after
        undone = undo()
        tried = [str(event.kind) for event in undone] or ["replay"]
        uids = tuple(uid for event in undone for uid in event.uids)
        detail = {"tried": tried, "before": before.loss, "after": after.loss}
        self.history.append(LifecycleEvent(trainer.state.step, layer, "undone", uids, detail))
        return before

    def _try_without(self, trainer: Trainer, name: str, rows: Tensor, now: Probe, needed: float) -> Probe:
        """Prunes experts on trial without which the loss is hardly higher; returns the losses afterwards."""
        step = trainer.state.step
        limits = {"min_age": self.config.min_age, "min_experts": self.min_experts}
        for uid in self.experts.on_trial(name, step=step, **limits):
            undo = self.experts.undo_point(trainer.optimizer)
            self._carry_out(trainer, name, Prune(uid, {}))
            without = self._probe(trainer, rows)
            undo()
            why = {"gain": without.loss / max(now.loss, 1e-12) - 1, "loss": now.loss, "loss_without": without.loss}
            if why["gain"] < needed:
                self._carry_out(trainer, name, Prune(uid, why))
                now = without
            else:
                self.history.append(LifecycleEvent(step, name, "kept", (uid,), why))
        return now

    def _replay(self, trainer: Trainer) -> None:
        """Makes optimizer steps on remembered samples, augmented as others are, at the learning rate `replay_lr`."""
        multiplier = self.config.replay_lr / trainer.base_rates[0]
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        for turn in range(self.config.replay_steps):
            visits = self.memory.draw_visits(trainer.run.config.batch_size, "sleep", trainer.state.step, turn)
            micro_batches = trainer.batches.micro_batches_of(visits)
            if self._balance is not None:
                self._balance.on_step_start(trainer, micro_batches)
            trainer.learn(micro_batches, multiplier, record=False)
            self._show_all_rows()
        # A scheduler that sets rates relative to the last ones goes on from them, and plans count training steps only.
        for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for cursor in self._cursors.values():
            cursor.advance()

    def _removals(self, trainer: Trainer, name: str, rows: Tensor, load_E: list[int]) -> list[Plan]:
        """Returns the merges, then the prunes, of one layer, given the assignments of all ranks since the last
        sleep."""
        roster = self.rosters[name]
        config = self.config
        load = {record.uid: float(load_E[record.logical_id]) for record in roster.active}
        merges: list[Merge] = []
        if config.merge_distance is not None:
            distance, similarity = self._compare(trainer, name, rows, config.merge_distance)
            graph = self._graph(name)
            if graph is not None:
                graph.observe_roster(roster, step=trainer.state.step)
                graph.observe_similarity(
                    {pair: min(weights, 1 - distance[pair]) for pair, weights in similarity.items()}
                )
            merges = plan_merges(
                roster,
                distance,
                similarity,
                load,
                max_distance=config.merge_distance,
                min_similarity=config.merge_similarity,
                min_experts=self.min_experts,
            )
        prunes = plan_prunes(
            roster,
            load,
            step=trainer.state.step,
            below=config.prune_below,
            min_age=config.min_age,
            min_experts=self.min_experts + len(merges),
            excluded={uid for merge in merges for uid in (merge.uid, merge.into)},
        )
        return [*merges, *prunes]

    def _compare(
        self, trainer: Trainer, name: str, rows: Tensor, max_distance: float
    ) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """Returns the distance of outputs of all pairs that are old enough, and the similarity of weights of those that
        may merge."""
        layer = self.layers[name]
        graph = self._graph(name)
        old = self.rosters[name].older_than(self.config.min_age, trainer.state.step)
        if len(old) < 2:
            return {}, {}
        x_TD = self._probe(trainer, rows, [layer]).views[0].x_TD  # in the dtype of autocast
        x_TD = x_TD.to(next(layer.experts.parameters()).dtype)
        apart = None if graph is None else graph.often_coactivated
        return compare_experts(layer, x_TD, old, max_distance=max_distance, keep_apart=apart)

    # --- parts --------------------------------------------------------------------------------------------------

    def _probe(self, trainer: Trainer, rows: Tensor, layers: Sequence[MoE] = ()) -> Probe:
        """Evaluates `rows` of the training table, equal on all ranks, with views of `layers`. A collective."""
        model = trainer.raw_model
        batch = trainer.batches.part_of(rows)

        def sample_losses() -> Tensor:
            with trainer.autocast():
                return self.task.sample_losses(model, batch)

        return probe_samples(model, sample_losses, layers, samples=len(rows))

    def _carry_out(self, trainer: Trainer, name: str, plan: Plan, **more: Any) -> None:
        self.experts.carry_out(name, plan, trainer.optimizer, step=trainer.state.step, **more)

    def _graph(self, name: str) -> KnowledgeGraph | None:
        return None if self.knowledge is None else self.knowledge.graphs[name]

    def _with_remembered(self, trainer: Trainer, rows: Tensor, purpose: str) -> Tensor:
        """Return `rows` and the same number from the replay buffer, unless it is empty."""
        if not len(self.memory):
            return rows
        return torch.cat([rows, self.memory.draw(len(rows), purpose, trainer.state.step)])

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A collective."""
        if not self.layers:
            return {}
        return {
            **self.experts.state_dict(),
            "alarm": self.alarm.state_dict(),
            "next_sleep": self.next_sleep,
            "load": {name: cursor.state_dict() for name, cursor in self._cursors.items()},
            "readings": self._readings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.layers:
            return
        self.experts.load_state_dict(state)
        self._routers_known = False
        self.alarm.load_state_dict(state["alarm"])
        self.next_sleep = state["next_sleep"]
        self._readings = dict(state["readings"])
        for name, cursor in self._cursors.items():
            cursor.load_state_dict(state["load"][name])


def next_rows(trainer: Trainer, samples: int) -> Tensor:
    """Return the first `samples` rows of the training table that the next steps will use; fewer if the run ends."""
    rows = torch.empty(0, dtype=torch.int64)
    for batch in trainer.batches.order.batches(trainer.state.step):
        rows = torch.cat([rows, batch])
        if len(rows) >= samples:
            break
    return rows[:samples]


def last_rows(trainer: Trainer, samples: int) -> Tensor:
    """Return the last `samples` rows of the training table that were used; the first step must be done."""
    step = trainer.state.step
    first = max(0, step - -(-samples // trainer.run.config.batch_size))
    return torch.cat(list(islice(trainer.batches.order.batches(first), step - first)))[-samples:]
