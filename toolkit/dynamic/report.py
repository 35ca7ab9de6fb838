"""The callback that keeps the knowledge graphs and writes lifecycle.jsonl, from which pictures are drawn."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.dynamic.callback import Lifecycle
from toolkit.dynamic.graph import KnowledgeGraph
from toolkit.dynamic.plots import draw_dynamic_run
from toolkit.dynamic.records import LIFECYCLE_FILE
from toolkit.dynamic.routing_statistics import Ids, RoutingStatistics
from toolkit.experts.layer.moe_layer import moe_layers
from toolkit.run.folder import write_text
from toolkit.run.tracking.jsonl import MetricsFile
from toolkit.train.callbacks.base import Callback
from toolkit.train.pictures import draw_run

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer


class LifecycleReport(Callback):
    """Callback that keeps a `KnowledgeGraph` per layer (`graphs`, equal on all ranks) and writes it each epoch.

    An epoch appends a line to lifecycle.jsonl and writes the graphs as JSON; plots are drawn from them when
    the run ends. Records `moe/specialisation/<layer>`, the mean over active experts weighted by load. A step keeps
    references to its routing; there is one reduction over ranks per epoch.

    Args:
        model: The model, whose MoE layers are reported.
        lifecycle: The callback that changes its experts.
        num_classes: The number of classes of samples.
        label: The key under which a batch has the class of each sample.
    """

    runs_after = (Lifecycle,)

    def __init__(self, model: nn.Module, *, lifecycle: Lifecycle, num_classes: int, label: str = "label"):
        self.layers = moe_layers(model)
        self.label = label
        self.lifecycle = lifecycle
        self.graphs = {name: KnowledgeGraph() for name in self.layers}
        self.statistics = RoutingStatistics(model, num_classes=num_classes, uids_of_logical=self._uids_of_logical)
        self._events_written = 0
        self._seconds = 0.0
        self._clock: float | None = None
        self._file: MetricsFile | None = None

    def _uids_of_logical(self, layer: str) -> Ids:
        return self.lifecycle.rosters[layer].uids_of_logical

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.layers:
            trainer.run.draw_at_finish(draw_dynamic_run, instead_of=draw_run)

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        self._clock = self._clock or time.perf_counter()
        self.statistics.begin_step(batch.get(self.label) for batch in micro_batches)

    def on_step_end(self, trainer: Trainer) -> None:
        self.statistics.end_step()
        step = trainer.state.step
        if self.layers and (step % trainer.batches.steps_per_epoch == 0 or step == trainer.max_steps):
            self._close_epoch(trainer)

    def on_fit_end(self, *_: Any, **__: Any) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    on_exception = on_fit_end

    def observe(self, step: int) -> None:
        """Update the graphs with the routing since the last update. A collective."""
        counts = self.statistics.take()
        for name, graph in self.graphs.items():
            roster, placement = self.lifecycle.rosters[name], self.layers[name].placement
            graph.observe_roster(roster, step=step)
            graph.decay()
            rank_of = {record.uid: placement.owner(record.logical_id).rank for record in roster.active}
            graph.observe_routing(counts[name].ids, counts[name].together_EE, counts[name].classes_EC, rank_of)

    def _close_epoch(self, trainer: Trainer) -> None:
        """A collective."""
        seconds = self._seconds_so_far()
        self._clock = None
        self._seconds = 0.0
        self.observe(trainer.state.step)
        for name, graph in self.graphs.items():
            trainer.record(f"moe/specialisation/{name}" if name else "moe/specialisation", mean_specialisation(graph))
        if trainer.run.is_main:
            self._write(trainer, seconds)
        self._events_written = len(self.lifecycle.history)

    def _write(self, trainer: Trainer, seconds: float) -> None:
        folder, step = trainer.run.folder, trainer.state.step
        if self._file is None:
            self._file = MetricsFile(folder / LIFECYCLE_FILE, trainer.run.print)
        layers = {}
        for name, graph in self.graphs.items():
            placement = self.layers[name].placement
            layers[name] = {
                "graph": graph.state_dict(),
                "uids_of_logical": self._uids_of_logical(name),
                "logical_on_ranks": [list(row) for row in placement.slots],
            }
            text = json.dumps(graph.state_dict(), indent=1)
            of_layer = "" if len(self.graphs) == 1 else f"_{name or 'moe'}"
            write_text(folder / f"knowledge_graph{of_layer}.json", text, durable=False)
        self._file.append(
            step,
            {
                "epoch": step / trainer.batches.steps_per_epoch,
                "seconds": seconds,
                "layers": layers,
                "events": [asdict(event) for event in self.lifecycle.history[self._events_written :]],
            },
        )

    def _seconds_so_far(self) -> float:
        """Returns the seconds of training in this epoch, without evaluations."""
        return self._seconds + (0.0 if self._clock is None else time.perf_counter() - self._clock)

    def state_dict(self) -> dict[str, Any]:
        """A collective."""
        return {
            "graphs": {name: graph.state_dict() for name, graph in self.graphs.items()},
            "statistics": self.statistics.state_dict(),
            "events_written": self._events_written,
            "seconds": self._seconds_so_far(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, graph in self.graphs.items():
            graph.load_state_dict(state["graphs"][name])
        self.statistics.load_state_dict(state["statistics"])
        self._events_written = state["events_written"]
        self._seconds = state["seconds"]


def mean_specialisation(graph: KnowledgeGraph) -> float:
    """Returns the mean specialisation of active experts, weighted by their share of the load."""
    nodes = [node for node in graph.graph.nodes.values() if node["active"]]
    total = sum(node["share"] for node in nodes)
    return sum(node["share"] * node["specialisation"] for node in nodes) / total if total else 0.0
