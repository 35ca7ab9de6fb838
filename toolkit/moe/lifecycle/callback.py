"""The lives of experts while a model trains: when something is to happen, in which order, and whether it stays.

How each thing is done is in the other files of this folder. All ranks measure the same numbers and therefore do the
same things at the same steps; nothing here depends on how many there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from toolkit.callbacks.base import Callback
from toolkit.config.experts import LifecycleConfig
from toolkit.moe.balance import WholeStepBalance
from toolkit.moe.layer import MoE, moe_layers
from toolkit.moe.lifecycle.alignment import similarity
from toolkit.moe.lifecycle.coverage import CoverageAlarm, Lack
from toolkit.moe.lifecycle.graph import KnowledgeGraph
from toolkit.moe.lifecycle.plans import Merge, Plan, Prune, plan_growth, plan_merges, plan_places, plan_prunes
from toolkit.moe.lifecycle.probe import Probe, ScoresSamples, output_distances, probe_samples
from toolkit.moe.lifecycle.roster import EventKind, ExpertRoster, LifecycleEvent
from toolkit.moe.lifecycle.router import DynamicRouter
from toolkit.moe.lifecycle.rows import ExpertRows
from toolkit.moe.lifecycle.sleep import SleepSchedule, Snapshot
from toolkit.moe.lifecycle.surgery import Surgeon
from toolkit.moe.load.routing_log import take_loads
from toolkit.moe.migrate import migrate

if TYPE_CHECKING:
    from toolkit.data.replay_memory import ReplayMemory
    from toolkit.task import Batch
    from toolkit.trainer import Trainer

MEASURED = 256
"""Samples on which a change is judged, and as many remembered ones."""


class Knowledge(Protocol):
    """Graphs of how experts relate, equal on all ranks."""

    @property
    def graphs(self) -> Mapping[str, KnowledgeGraph]:
        """By layer."""
        ...

    def observe(self, step: int) -> None:
        """Take up what happened until `step`. A collective."""
        ...


class Lifecycle(Callback):
    """Grows experts when the data are no longer covered; in sleep replays, merges, prunes and evens out ranks.

    Acts on the layers of `model` that were made with `logical_experts`, and is idle where there are none. `task` scores samples
    one by one; `memory` is what sleep replays, filled by whoever sees the data (`toolkit.domains.continual.Remember`).

    With `balance`, the balance loss of a step of replay is that of the whole step, as it is for other steps. Given
    `knowledge`, it does not merge experts that many tokens want both of, and leaves them on one rank where it can.

    Whatever sleep does is measured before and after, on the latest samples and on remembered ones, and undone where the
    loss rose by more than `config.undo_above`.

    Records on each line of metrics `lifecycle/experts` (living, mean over layers), and the last readings of
    `lifecycle/uncovered`, `lifecycle/loss_before_sleep` and `lifecycle/loss_after_sleep`; leaves in the run's results how many
    experts live and were born, merged and pruned, and how often it slept.
    """

    def __init__(
        self,
        model: nn.Module,
        task: ScoresSamples,
        memory: ReplayMemory,
        config: LifecycleConfig,
        *,
        min_experts: int,
        balance: WholeStepBalance | None = None,
        seed: int = 0,
    ):
        self.layers: dict[str, MoE] = {
            name: layer for name, layer in moe_layers(model).items() if isinstance(layer.router, DynamicRouter)
        }
        self.task, self.memory, self.config, self.min_experts, self.seed = task, memory, config, min_experts, seed
        self.balance = balance
        self.knowledge: Knowledge | None = None
        """To be asked whom to spare and whom to move: `LifecycleReport` is one."""
        self.rosters = {name: _initial(layer) for name, layer in self.layers.items()}
        self.history: list[LifecycleEvent] = []
        self.likeness: dict[str, dict[tuple[int, int], tuple[float, float]]] = {}
        """By layer, of pairs of experts that the last sleep compared closely: distance of outputs, and similarity of
        aligned weights."""
        self.seconds = {"look": 0.0, "sleep": 0.0}
        """Spent in this process."""
        self.alarm = CoverageAlarm(tolerated=config.tolerated, cooldown=config.cooldown_checks)
        self.schedule = SleepSchedule(
            config.sleep_every, config.min_sleep_every, config.max_sleep_every, config.adaptive_sleep
        )
        self._initial = max((len(roster) for roster in self.rosters.values()), default=1)
        self.next_sleep = self.schedule.steps(self._initial, self._initial)
        self._cursors = {name: layer.expert_stack.log.cursor() for name, layer in self.layers.items()}
        """What was routed since the last sleep."""
        self._readings: dict[str, float] = {}
        self._routers_known = False
        """Whether the routers were refreshed since the weights were loaded."""

    # --- when ---------------------------------------------------------------------------------------------------

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        if not self._routers_known:
            self._refresh_routers()

    def on_step_end(self, trainer: Trainer) -> None:
        if not self.layers:
            return
        step, began = trainer.state.step, time.perf_counter()
        if self.config.grow and step % self.config.check_every == 0:
            self.look(trainer)
            self.seconds["look"] += time.perf_counter() - began
        if self.config.sleep and step >= self.next_sleep:
            began = time.perf_counter()
            self.sleep(trainer)
            self.seconds["sleep"] += time.perf_counter() - began
        if trainer.at_log_step:
            active = [len(roster) for roster in self.rosters.values()]
            trainer.record("lifecycle/experts", sum(active) / len(active))
            for name, value in self._readings.items():
                trainer.record(f"lifecycle/{name}", value)

    def on_fit_end(self, trainer: Trainer) -> None:
        if not self.layers:
            return
        counts = {f"life_{kind}": sum(event.kind == kind for event in self.history) for kind in _COUNTED}
        active = max(len(roster) for roster in self.rosters.values())
        trainer.results |= {"active_experts": active, **counts}

    # --- awake --------------------------------------------------------------------------------------------------

    def look(self, trainer: Trainer) -> None:
        """See how well the coming samples are covered, and grow where they no longer are."""
        rows = self._coming(trainer, self.config.check_samples)
        probe = probe_samples(trainer, self.task, list(self.layers.values()), rows)
        self._readings["uncovered"] = probe.uncovered
        lack = self.alarm.observe(probe.uncovered, probe.samples)
        if lack is not None:
            self.grow(trainer, lack)

    def grow(self, trainer: Trainer, lack: Lack) -> None:
        """Halve the experts that answer for most of what is not covered."""
        step, layers = trainer.state.step, list(self.layers.values())
        rows = self._with_remembered(trainer, self._coming(trainer, MEASURED), "grow")
        for _ in range(self.config.growths_at_once if lack == "shift" else 1):
            probe = probe_samples(trainer, self.task, layers, rows)
            for index, (name, layer) in enumerate(self.layers.items()):
                roster, fresh = self.rosters[name], self.config.new_expert == "fresh"
                by_logical_id = probe.responsibility(index, roster.logical_experts).tolist()
                uncovered = {record.id: by_logical_id[record.logical_id] for record in roster.active}
                plan = plan_growth(roster, layer.placement, uncovered, fresh=fresh)
                if plan is None:
                    continue
                divider = probe.divider(index, roster.logical_id_of(plan.parent))
                surgeon = self._surgeon(trainer, name)
                self.rosters[name] = surgeon.carry_out(plan, step=step, divider=divider)
                created_at = self.rosters[name].records[-1].id
                rank = layer.placement.owner(plan.logical_id).rank
                self._note(step, name, "grow", (created_at, plan.parent), lack=lack, rank=rank, **plan.why)

    # --- asleep -------------------------------------------------------------------------------------------------

    def sleep(self, trainer: Trainer) -> None:
        """Replay, merge, prune, even out ranks; and say when to sleep next."""
        step, events = trainer.state.step, len(self.history)
        loads = take_loads(list(self._cursors.values()))
        if self.knowledge is not None:
            self.knowledge.observe(step)
        rows = self._with_remembered(trainer, self._recent(trainer, MEASURED), "sleep")
        before = loss = self._probe_samples(trainer, rows).loss
        if self.config.replay_steps and len(self.memory):
            loss = self._attempt(trainer, rows, loss, "", partial(self._replay, trainer))
        for name, load_E in zip(self.layers, loads, strict=True):
            for plan in self._endings(trainer, name, rows, load_E.tolist()):
                loss = self._attempt(trainer, rows, loss, name, partial(self._end, trainer, name, plan))
        for name, layer in self.layers.items():
            roster, graph = self.rosters[name], self._graph(name)
            together_SS = None if graph is None else graph.affinity(roster.uid_at)
            places = plan_places(roster, layer.placement, together_SS)
            if places != layer.placement:
                migrate(layer.expert_stack, places, trainer.optimizer)
        self._readings |= {"loss_before_sleep": before, "loss_after_sleep": loss}
        changes = [event.kind for event in self.history[events:]]
        self._note(step, "", "sleep", (), before=before, after=loss, changes=changes)
        active = max(len(roster) for roster in self.rosters.values())
        self.next_sleep = step + self.schedule.steps(active, self._initial)

    def _replay(self, trainer: Trainer) -> None:
        """Learn from remembered samples and their labels, at the replay's own learning rate."""
        size = self.config.replay_batch_size or trainer.run.config.batch_size
        multiplier = self.config.replay_lr / trainer.base_rates[0]
        for turn in range(self.config.replay_steps):
            rows = self.memory.draw(size, "sleep", trainer.state.step, turn)
            micro_batches = trainer.batches.micro_batches_of(rows)
            if self.balance is not None:
                self.balance.on_step_start(trainer, micro_batches)
            trainer.learn(micro_batches, multiplier, record=False)

    def _endings(self, trainer: Trainer, name: str, rows: Tensor, load_E: list[int]) -> list[Plan]:
        """Whom to merge and whom to prune, given the assignments of all ranks since the last sleep."""
        roster, config = self.rosters[name], self.config
        traffic = {record.id: float(load_E[record.logical_id]) for record in roster.active}
        merges: list[Merge] = []
        if config.merge:
            distance, alike = self._compare(trainer, name, rows)
            self.likeness[name] = {pair: (distance[pair], value) for pair, value in alike.items()}
            merges = plan_merges(
                roster,
                distance,
                alike,
                traffic,
                most_distance=config.merge_distance,
                least_similarity=config.merge_similarity,
                min_experts=self.min_experts,
            )
        prunes: list[Prune] = []
        if config.prune:
            prunes = plan_prunes(
                roster,
                traffic,
                step=trainer.state.step,
                below=config.prune_below,
                min_age=config.min_age,
                min_experts=self.min_experts + len(merges),
                spared=[id for merge in merges for id in (merge.id, merge.into)],
            )
        return [*merges, *prunes]

    def _compare(
        self, trainer: Trainer, name: str, rows: Tensor
    ) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
        """By pair of ids of those who may be merged: how differently two experts answer; and of those that answer
        alike, whether their weights are alike as well."""
        layer, active = self.layers[name], self.rosters[name].older_than(self.config.min_age, trainer.state.step)
        if len(active) < 2:
            return {}, {}
        view = probe_samples(trainer, self.task, [layer], rows).views[0]
        far_LL = output_distances(layer, view.x_TD, [record.logical_id for record in active]).tolist()
        pairs = list(combinations(range(len(active)), 2))
        distance = {(active[a].id, active[b].id): far_LL[a][b] for a, b in pairs}
        expert_rows, alike = ExpertRows(layer.expert_stack, None), {}
        for a, b in pairs:
            if far_LL[a][b] <= self.config.merge_distance and not self._wanted_together(
                name, active[a].id, active[b].id
            ):
                mine, other = expert_rows.fetch(active[a].logical_id), expert_rows.fetch(active[b].logical_id)
                alike[active[a].id, active[b].id] = similarity(mine, other)
        return distance, alike

    def _graph(self, name: str) -> KnowledgeGraph | None:
        return None if self.knowledge is None else self.knowledge.graphs[name]

    def _wanted_together(self, name: str, a: int, b: int) -> bool:
        graph = self._graph(name)
        return graph is not None and graph.wanted_together(a, b)

    def _end(self, trainer: Trainer, name: str, plan: Plan) -> None:
        self.rosters[name] = self._surgeon(trainer, name).carry_out(plan, step=trainer.state.step)
        if isinstance(plan, Merge):
            self._note(trainer.state.step, name, "merge", (plan.into, plan.id), **plan.why)
        elif isinstance(plan, Prune):
            self._note(trainer.state.step, name, "prune", (plan.id,), **plan.why)

    def _attempt(self, trainer: Trainer, rows: Tensor, loss: float, layer: str, change: Callable[[], None]) -> float:
        """Make a change and keep it unless it raises the loss by more than is tolerated; returns the loss after it."""
        rosters, events = dict(self.rosters), len(self.history)
        snapshot = Snapshot(trainer.raw_model, trainer.optimizer)
        change()
        after = self._probe_samples(trainer, rows).loss
        if after <= loss * (1 + self.config.undo_above):
            return after
        snapshot.restore()
        self._refresh_routers()
        self.rosters = rosters
        tried = [str(event.kind) for event in self.history[events:]] or ["replay"]
        ids = tuple(id for event in self.history[events:] for id in event.ids)
        del self.history[events:]
        self._note(trainer.state.step, layer, "undone", ids, tried=tried, before=loss, after=after)
        return loss

    def _refresh_routers(self) -> None:
        for layer in self.layers.values():
            assert isinstance(layer.router, DynamicRouter)
            layer.router.refresh()
        self._routers_known = True

    # --- parts --------------------------------------------------------------------------------------------------

    def _probe_samples(self, trainer: Trainer, rows: Tensor) -> Probe:
        return probe_samples(trainer, self.task, [], rows)

    def _coming(self, trainer: Trainer, samples: int) -> Tensor:
        """The rows of the steps to come."""
        return _first(trainer.batches.order.batches(trainer.state.step), samples)

    def _recent(self, trainer: Trainer, samples: int) -> Tensor:
        """Rows of the last steps. What is yet to come may be another task, which sleep cannot be blamed for."""
        step = trainer.state.step
        first = max(0, step - -(-samples // trainer.run.config.batch_size))
        return torch.cat(list(islice(trainer.batches.order.batches(first), step - first)))[-samples:]

    def _with_remembered(self, trainer: Trainer, rows: Tensor, purpose: str) -> Tensor:
        """`rows` and, where any are remembered, as many of those."""
        if not len(self.memory):
            return rows
        return torch.cat([rows, self.memory.draw(len(rows), purpose, trainer.state.step)])

    def _surgeon(self, trainer: Trainer, name: str) -> Surgeon:
        return Surgeon(self.layers[name], self.rosters[name], trainer.optimizer, seed=self.seed)

    def _note(self, step: int, layer: str, kind: EventKind, ids: tuple[int, ...], **detail: Any) -> None:
        self.history.append(LifecycleEvent(step, layer, kind, ids, detail))

    def state_dict(self) -> dict[str, Any]:
        """A collective."""
        if not self.layers:
            return {}
        return {
            "rosters": {name: roster.to_dict() for name, roster in self.rosters.items()},
            "history": [asdict(event) for event in self.history],
            "alarm": self.alarm.state_dict(),
            "next_sleep": self.next_sleep,
            "load": {name: cursor.state_dict() for name, cursor in self._cursors.items()},
            "readings": self._readings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.layers:
            return
        self.rosters = {name: ExpertRoster.from_dict(saved) for name, saved in state["rosters"].items()}
        self._routers_known = False
        self.history = [LifecycleEvent(**{**event, "ids": tuple(event["ids"])}) for event in state["history"]]
        self.alarm.load_state_dict(state["alarm"])
        self.next_sleep, self._readings = state["next_sleep"], dict(state["readings"])
        for name, cursor in self._cursors.items():
            cursor.load_state_dict(state["load"][name])


_COUNTED: tuple[EventKind, ...] = ("grow", "merge", "prune", "sleep", "undone")


def _first(batches: Iterator[Tensor], samples: int) -> Tensor:
    rows = torch.empty(0, dtype=torch.int64)
    for batch in batches:
        rows = torch.cat([rows, batch])
        if len(rows) >= samples:
            break
    return rows[:samples]


def _initial(layer: MoE) -> ExpertRoster:
    assert isinstance(layer.router, DynamicRouter)
    return ExpertRoster.initial(int(layer.router.active_E.sum()), layer.placement.num_experts)
