"""lifecycle.jsonl: a line per epoch with the knowledge graph, placement and events of each layer.

`toolkit.dynamic.report` writes it. Pictures and the performance summary are made from it, so they can
be made again from a run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.run.tracking.jsonl import read_metrics

LIFECYCLE_FILE = "lifecycle.jsonl"
Node = Mapping[str, Any]


@dataclass(frozen=True)
class LayerState:
    """One layer at the end of an epoch."""

    nodes: Mapping[int, Node]
    """The knowledge graph's experts by uid, removed ones too."""
    edges: Sequence[Mapping[str, Any]]
    """Edges with `source`, `target`, `kind` and `weight`."""
    uids_of_logical: Sequence[int | None]
    logical_on_ranks: Sequence[Sequence[int]]
    """The logical expert in each slot of each rank; negative for an empty slot."""

    @cached_property
    def active(self) -> list[int]:
        """uids."""
        return [uid for uid, node in self.nodes.items() if node["active"]]

    @property
    def uids_on_ranks(self) -> list[list[int]]:
        """The active experts on each rank."""
        return [
            [uid for logical_id in row if logical_id >= 0 and (uid := self.uids_of_logical[logical_id]) is not None]
            for row in self.logical_on_ranks
        ]

    def uids_at(self, step: int) -> dict[int, int]:
        """Return the uid of each logical expert that was active in `step`, up to this epoch."""
        return {
            node["logical_id"]: uid
            for uid, node in self.nodes.items()
            if node["created_at"] < step and (node["removed_at"] is None or step <= node["removed_at"])
        }

    def rows_by_uid(self, rows: Sequence[Sequence[int]], step: int) -> list[list[int]]:
        """The uids of the logical experts on each rank that were active in `step`."""
        uids = self.uids_at(step)
        return [[uids[expert] for expert in row if expert in uids] for row in rows]

    def by_uid(self, values: Sequence[Any], step: int) -> list[Any]:
        """Return `values` per logical expert of the log step `step`, by uid; None for an inactive expert."""
        found = {uid: values[expert] for expert, uid in self.uids_at(step).items() if expert < len(values)}
        return [found.get(uid) for uid in range(1 + max(self.nodes, default=-1))]


@dataclass(frozen=True)
class Epoch:
    """One line of the file."""

    number: float
    """Epochs done at its end; fractional if `max_steps` ended the run within an epoch."""
    step: int
    """Optimizer steps done at its end."""
    seconds: float
    """Seconds of training, without evaluations."""
    layers: Mapping[str, LayerState]
    events: Sequence[Mapping[str, Any]]
    """`LifecycleEvent`s as dictionaries, in order."""

    @property
    def name(self) -> str:
        return f"{self.number:.4g}"

    def events_of(self, layer: str) -> list[Mapping[str, Any]]:
        """Return the events of `layer`, including events of all layers (sleep phases)."""
        return [event for event in self.events if event["layer"] in (layer, "")]


def read_lifecycle(folder: Path) -> list[Epoch]:
    """Return the epochs of the run in `folder`; empty if it has no lifecycle.jsonl."""
    return [
        Epoch(
            number=line["epoch"],
            step=line["step"],
            seconds=line["seconds"],
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


def describe(event: Mapping[str, Any]) -> str:
    """A lifecycle event in words."""
    uids = event["uids"]
    if event["kind"] == "grow":
        return " split from ".join(map(str, uids))
    if event["kind"] == "merge":
        return f"{uids[1]} merged into {uids[0]}"
    if event["kind"] == "prune":
        gain = event["detail"].get("gain")
        return f"{uids[0]} pruned" + ("" if gain is None else f": the loss without it is {gain:+.1%}")
    if event["kind"] == "kept":
        return f"{uids[0]} kept: the loss without it is {event['detail']['gain']:.1%} higher"
    if event["kind"] == "undone":
        tried = " and ".join(event["detail"].get("tried", ["change"]))
        return f"{tried}{' of ' if uids else ''}{', '.join(map(str, uids))} undone"
    return f"sleep at step {event['step']:,}"
