"""lifecycle.jsonl and knowledge graphs of complete, resumed and distributed runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.dynamic.dynamic_run import dynamic_config, dynamic_trainer
from tests.support.trainers import in_hook
from toolkit.dynamic.records import read_lifecycle
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.tracking.jsonl import read_metrics

STEPS = 66
"""The second task starts after 50."""


def fail(_: tk.Trainer) -> None:
    raise RuntimeError("out of luck")


def train(folder: Path, ep_size: int = 1, callbacks: Sequence[tk.Callback] = ()) -> None:
    config = dynamic_config(folder, max_steps=STEPS, checkpoint=CheckpointOptions(every_steps=52))
    with dynamic_trainer(config, ep_size=ep_size, callbacks=callbacks, reported=True) as (trainer, _):
        trainer.fit()


def record(folder: Path) -> list[dict[str, Any]]:
    """Return lifecycle.jsonl without times."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder / "lifecycle.jsonl")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    train(folder)
    return folder


def test_record_has_events_loads_and_classes(reference):
    (epoch,) = read_lifecycle(reference)
    assert epoch.step == STEPS
    assert epoch.seconds > 0
    assert {"grow", "sleep"} <= {event["kind"] for event in epoch.events}
    state = epoch.layers["moe"]
    assert [uid for uid in state.uids_of_logical if uid is not None] == sorted(
        state.active, key=lambda uid: state.nodes[uid]["logical_id"]
    )
    assert sum(node["share"] for node in state.nodes.values()) == pytest.approx(1)
    assert all(sum(node["classes"]) == pytest.approx(1, abs=1e-3) for node in state.nodes.values() if node["share"])
    kinds = {edge["kind"] for edge in state.edges}
    assert {"coactivation", "split"} <= kinds
    graph = nx.node_link_graph(json.loads((reference / "knowledge_graph.json").read_text()), edges="edges")
    assert set(graph.nodes) == set(state.nodes)
    (last,) = (line for line in read_metrics(reference / "metrics.jsonl") if line["step"] == STEPS)
    assert 0 < last["moe/specialisation/moe"] < 1


def test_resumed_run_has_the_same_record(reference, tmp_path):
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path, callbacks=[in_hook("on_step_end", fail, 58)])
    train(tmp_path)
    assert record(tmp_path) == record(reference)
    graph, expected = (json.loads((folder / "knowledge_graph.json").read_text()) for folder in (tmp_path, reference))
    assert graph == expected


def test_two_processes_have_the_same_record_except_for_placement(reference, tmp_path):
    run_distributed(train, 2, tmp_path, 2)
    expected, found = record(reference), record(tmp_path)
    for line in (expected[0], found[0]):
        layer = line["layers"]["moe"]
        layer.pop("logical_on_ranks")
        layer.pop("uids_of_logical")
        for node in layer["graph"]["nodes"]:
            node.pop("rank"), node.pop("logical_id")
        for event in line["events"]:
            event["detail"] = {k: v for k, v in event["detail"].items() if isinstance(v, (str, list))}
    assert found == expected
