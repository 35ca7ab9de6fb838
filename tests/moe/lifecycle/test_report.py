"""The report of an eventful run: the same from a stopped one, and from two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import toolkit as tk
from tests.helpers import run_distributed
from tests.moe.lifecycle.dynamic_run import living_config, living_trainer
from toolkit.tracking.jsonl import read_metrics
from toolkit.pictures.lifecycle_records import read_population

STEPS = 62
"""The second task begins after 50."""


class Fails(tk.Callback):
    def on_step_end(self, trainer: tk.Trainer) -> None:
        if trainer.state.step == 58:
            raise RuntimeError("out of luck")


def train(folder: Path, *callbacks: tk.Callback, ep_size: int = 1) -> None:
    config = living_config(folder, max_steps=STEPS, checkpoint=tk.CheckpointConfig(every_steps=52))
    with living_trainer(config, ep_size=ep_size, callbacks=callbacks, reported=True) as (trainer, _):
        trainer.fit()


def train_on_two(folder: Path) -> None:
    train(folder, ep_size=2)


def record(folder: Path) -> list[dict[str, Any]]:
    """population.jsonl without what two runs never share."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder / "population.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder


def test_the_record_tells_what_happened_and_who_saw_what(whole):
    (epoch,) = read_population(whole)
    assert epoch.step == STEPS
    assert epoch.seconds > 0
    assert {"grow", "sleep"} <= {event["kind"] for event in epoch.events}
    state = epoch.layers["moe"]
    assert [id for id in state.ids_on_seats if id is not None] == sorted(
        state.living, key=lambda id: state.nodes[id]["seat"]
    )
    assert sum(node["share"] for node in state.nodes.values()) == pytest.approx(1)
    assert all(sum(node["classes"]) == pytest.approx(1, abs=1e-3) for node in state.nodes.values() if node["share"])
    kinds = {edge["kind"] for edge in state.edges}
    assert {"coactivation", "split"} <= kinds
    graph = json.loads((whole / "knowledge_graph.json").read_text())
    assert {node["id"] for node in graph["nodes"]} == set(state.nodes)
    (last,) = (line for line in read_metrics(whole / "metrics.jsonl") if line["step"] == STEPS)
    assert 0 < last["moe/specialisation/moe"] < 1


def test_a_run_that_was_stopped_leaves_the_same_record(whole, tmp_path):
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path, Fails())
    train(tmp_path)
    assert record(tmp_path) == record(whole)
    graphs = [
        nx.read_graphml(folder / "knowledge_graph.graphml", force_multigraph=True) for folder in (tmp_path, whole)
    ]
    assert nx.utils.graphs_equal(*graphs)


def test_two_processes_leave_the_same_record_but_for_places(whole, tmp_path):
    run_distributed(train_on_two, 2, tmp_path)
    alone, both = record(whole), record(tmp_path)
    for line in (alone[0], both[0]):
        line.pop("world_size")
        layer = line["layers"]["moe"]
        layer.pop("seats_on_ranks")
        layer.pop("ids_on_seats")
        for node in layer["graph"]["nodes"]:
            node.pop("rank"), node.pop("seat")
        for event in line["events"]:
            event["detail"] = {k: v for k, v in event["detail"].items() if isinstance(v, (str, list))}
    assert both == alone
