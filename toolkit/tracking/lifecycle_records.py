"""lifecycle.jsonl: a line per epoch about who lived in each layer, what they saw, and what happened to them.

`toolkit.moe.lifecycle.report` writes it; pictures and the performance summary are drawn from it, so that both can be
made anew from a run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.tracking.jsonl import read_metrics

LIFECYCLE_FILE = "lifecycle.jsonl"
Node = Mapping[str, Any]


@dataclass(frozen=True)
class LayerState:
    """One layer at the end of an epoch."""

    nodes: Mapping[int, Node]
    """The knowledge graph's experts by id, gone ones too."""
    edges: Sequence[Mapping[str, Any]]
    """With `source`, `target`, `kind` and `weight`."""
    uids_of_logical: Sequence[int | None]
    logical_on_ranks: Sequence[Sequence[int]]
    """The seat in each slot of each rank; negative where the slot is empty."""

    @cached_property
    def active(self) -> list[int]:
        return [id for id, node in self.nodes.items() if node["active"]]

    @property
    def ids_on_ranks(self) -> list[list[int | None]]:
        """The expert in each slot of each rank; None for a vacant seat or an empty slot."""
        return [
            [None if logical_id < 0 else self.uids_of_logical[logical_id] for logical_id in row]
            for row in self.logical_on_ranks
        ]


@dataclass(frozen=True)
class Epoch:
    """One line of the file."""

    number: float
    """Epochs done at its end; a whole number but for the last one of a run with a limit of steps."""
    began: int
    """Steps done when it began."""
    step: int
    """Steps done at its end."""
    seconds: float
    """Of training, evaluations left out."""
    world_size: int
    device: str
    layers: Mapping[str, LayerState]
    events: Sequence[Mapping[str, Any]]
    """`LifecycleEvent`s as dictionaries, in order."""

    @property
    def name(self) -> str:
        return f"{self.number:.4g}"

    def events_of(self, layer: str) -> list[Mapping[str, Any]]:
        """Those of `layer`, and those of all layers."""
        return [event for event in self.events if event["layer"] in (layer, "")]


def read_lifecycle(folder: Path) -> list[Epoch]:
    """The epochs of the run in `folder`; none where no population was recorded."""
    return [
        Epoch(
            number=line["epoch"],
            began=line["began"],
            step=line["step"],
            seconds=line["seconds"],
            world_size=line["world_size"],
            device=line["device"],
            layers={
                name: LayerState(
                    nodes={node["id"]: node for node in layer["graph"]["nodes"]},
                    edges=layer["graph"]["edges"],
                    uids_of_logical=layer["uids_of_logical"],
                    logical_on_ranks=layer["logical_on_ranks"],
                )
                for name, layer in line["layers"].items()
            },
            events=line["events"],
        )
        for line in read_metrics(folder / LIFECYCLE_FILE)
    ]


def tell(event: Mapping[str, Any], layer: LayerState) -> str:
    """A lifecycle event in a few words."""
    ids = event["ids"]
    if event["kind"] == "grow":
        parent = layer.nodes[ids[0]]["parent"]
        return f"{ids[0]} born" + (f" of {parent}" if parent is not None else "")
    if event["kind"] == "merge":
        return f"{', '.join(map(str, ids[1:]))} merged into {ids[0]}"
    if event["kind"] == "prune":
        return f"{', '.join(map(str, ids))} pruned"
    if event["kind"] == "undone":
        tried = " and ".join(event["detail"].get("tried", ["change"]))
        return f"{tried}{' of ' if ids else ''}{', '.join(map(str, ids))} undone"
    return f"sleep at step {event['step']:,}"


def graph_stem(layer: str, layers: Sequence[str]) -> str:
    """The name, without its ending, of the files that hold the last knowledge graph of `layer`."""
    return "knowledge_graph" if len(layers) == 1 else f"knowledge_graph_{layer or 'moe'}"
