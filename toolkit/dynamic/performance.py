"""performance_summary.txt: a run with dynamic experts as plain text: epochs, experts, lifecycle events, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.dynamic.records import Epoch, LayerState, describe, read_lifecycle
from toolkit.run.tracking.jsonl import read_metrics

MOST_LINES = 200
"""Events, and experts of a layer, that are listed at most: the latest."""


def performance_summary(folder: Path) -> str:
    """The text for the finished run in `folder`."""
    epochs = read_lifecycle(folder)
    parts = [
        _section("Run", (folder / "summary.txt").read_text(encoding="utf-8")),
        _section("Epochs", _epochs(epochs, list(read_metrics(folder / "metrics.jsonl")))),
        *(_section(f"Experts of {layer or 'the MoE layer'}", _experts(epochs, layer)) for layer in epochs[-1].layers),
        _section("Events", _events(epochs)),
        _section("Devices", _devices(epochs[-1])),
        _section("Files", _files(folder)),
    ]
    return "\n".join(parts)


def _section(title: str, body: str) -> str:
    return f"{title}\n{'-' * len(title)}\n{body}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _epochs(epochs: Sequence[Epoch], lines: Sequence[Mapping[str, Any]]) -> str:
    def at(name: str, step: int, percent: bool = False) -> str:
        values = [line[name] for line in lines if line["step"] == step and line.get(name) is not None]
        return "" if not values else f"{values[-1]:.2%}" if percent else f"{values[-1]:.4f}"

    rows = [
        [
            epoch.name,
            f"{epoch.step:,}",
            at("train/loss", epoch.step),
            at("eval/loss", epoch.step),
            at("eval/accuracy", epoch.step, percent=True),
            f"{epoch.seconds:.2f}",
            " ".join(str(len(state.active)) for state in epoch.layers.values()),
            str(len(epoch.events)),
        ]
        for epoch in epochs
    ]
    head = ["epoch", "step", "train loss", "test loss", "test accuracy", "seconds", "active experts", "events"]
    return _table(head, rows)


def _experts(epochs: Sequence[Epoch], layer: str) -> str:
    state = epochs[-1].layers[layer]
    fates = [node["fate"] for node in state.nodes.values()]
    sleeps = sum(event["kind"] == "sleep" for epoch in epochs for event in epoch.events_of(layer))
    undone = sum(event["kind"] == "undone" for epoch in epochs for event in epoch.events_of(layer))
    added = sum(node["created_at"] > 0 for node in state.nodes.values())
    counts = (
        f"{len(fates) - added} at first, {added} added, "
        f"{fates.count('merged')} merged, {fates.count('pruned')} pruned; "
        f"{len(state.active)} of {len(state.uids_of_logical)} logical experts active; "
        f"{sleeps} sleeps, {undone} changes undone\n"
    )
    head = ["uid", "created at", "split from", "removed at", "fate", "share", "specialisation", "top classes", "rank"]
    rows = [[str(id), *_expert(state.nodes[id])] for id in sorted(state.nodes)[-MOST_LINES:]]
    return counts + _table(head, rows)


def _expert(node: Mapping[str, Any]) -> list[str]:
    def known(value: Any) -> str:
        return "" if value is None else f"{value:,}"

    into = f" into {node['merged_into']}" if node["merged_into"] is not None else ""
    return [
        known(node["created_at"]),
        known(node["parent"]),
        known(node["removed_at"]),
        node["fate"] + into,
        f"{node['share']:.1%}",
        f"{node['specialisation']:.2f}",
        " ".join(map(str, node["top_classes"])),
        known(node["rank"]),
    ]


def _events(epochs: Sequence[Epoch]) -> str:
    told = [(event, epoch) for epoch in epochs for event in epoch.events]
    if not told:
        return "no expert was added, merged or pruned\n"
    lines = [f"{event['step']:>9,}  {_where(event, epoch)}{_why(event)}\n" for event, epoch in told[-MOST_LINES:]]
    return "".join(lines)


def _where(event: Mapping[str, Any], epoch: Epoch) -> str:
    layer = event["layer"] or next(iter(epoch.layers))
    words = describe(event, epoch.layers[layer])
    return f"{event['layer']}: {words}" if len(epoch.layers) > 1 and event["layer"] else words


def _why(event: Mapping[str, Any]) -> str:
    reasons = [f"{name} {value:.4g}" for name, value in event["detail"].items() if isinstance(value, (int, float))]
    return f" ({', '.join(reasons)})" if reasons else ""


def _devices(epoch: Epoch) -> str:
    if epoch.world_size == 1:
        return f"one process on {epoch.device} holds all experts\n"
    text = f"{epoch.world_size} processes on {epoch.device}\n"
    for layer, state in epoch.layers.items():
        text += f"{layer}\n" if len(epoch.layers) > 1 else ""
        text += "".join(f"rank {rank}: {_held(state, rank)}\n" for rank in range(len(state.uids_on_ranks)))
    return text


def _held(state: LayerState, rank: int) -> str:
    ids = [str(id) for id in state.uids_on_ranks[rank] if id is not None]
    share = sum(state.nodes[int(id)]["share"] for id in ids)
    return f"{len(ids)} experts ({', '.join(ids)}), {share:.1%} of the assignments" if ids else "no experts"


def _files(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".png", ".json", ".jsonl"))
    return "".join(f"{name}\n" for name in names)
