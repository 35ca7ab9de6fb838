"""performance_summary.txt: a run with dynamic experts as plain text: epochs, experts, lifecycle events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.dynamic.records import Epoch, describe, read_lifecycle
from toolkit.run.summary import table
from toolkit.run.tracking.jsonl import read_metrics

MOST_LINES = 200
"""Events, and experts of a layer, that are listed at most: the latest."""


def performance_summary(folder: Path) -> str:
    """Return the text for the finished run in `folder`."""
    epochs = read_lifecycle(folder)
    lines = {line["step"]: line for line in read_metrics(folder / "metrics.jsonl")}
    events = [_event(event, epoch) for epoch in epochs for event in epoch.events][-MOST_LINES:]
    parts = {
        "Run": (folder / "summary.txt").read_text(encoding="utf-8"),
        "Epochs": table([_epoch(epoch, lines.get(epoch.step, {})) for epoch in epochs]),
        **{f"Experts of {layer or 'the MoE layer'}": _experts(epochs, layer) for layer in epochs[-1].layers},
        "Events": "".join(events) or "no expert was added, merged or pruned\n",
    }
    return "\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in parts.items())


def _epoch(epoch: Epoch, line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "epoch": epoch.name,
        "step": epoch.step,
        "train loss": line.get("train/loss"),
        "test loss": line.get("eval/loss"),
        "test accuracy": line.get("eval/accuracy"),
        "seconds": epoch.seconds,
        "active experts": " ".join(str(len(state.active)) for state in epoch.layers.values()),
        "events": len(epoch.events),
    }


def _experts(epochs: Sequence[Epoch], layer: str) -> str:
    state = epochs[-1].layers[layer]
    nodes = [(uid, state.nodes[uid]) for uid in sorted(state.nodes)]
    fates = [node["fate"] for _, node in nodes]
    kinds = [event["kind"] for epoch in epochs for event in epoch.events_of(layer)]
    added = sum(node["created_at"] > 0 for _, node in nodes)
    counts = (
        f"{len(fates) - added} at first, {added} added, "
        f"{fates.count('merged')} merged, {fates.count('pruned')} pruned; "
        f"{len(state.active)} of {len(state.uids_of_logical)} logical experts active; "
        f"{kinds.count('sleep')} sleeps, {kinds.count('undone')} changes undone\n"
    )
    rows = [
        {
            "uid": uid,
            "created at": node["created_at"],
            "split from": node["parent"],
            "removed at": node["removed_at"],
            "fate": node["fate"] + ("" if node["merged_into"] is None else f" into {node['merged_into']}"),
            "share": node["share"],
            "specialisation": node["specialisation"],
            "top classes": " ".join(map(str, node["top_classes"])),
            "rank": node["rank"],
        }
        for uid, node in nodes[-MOST_LINES:]
    ]
    return counts + table(rows)


def _event(event: Mapping[str, Any], epoch: Epoch) -> str:
    name = f"{event['layer']}: " if event["layer"] and len(epoch.layers) > 1 else ""
    numbers = [f"{name} {value:.4g}" for name, value in event["detail"].items() if isinstance(value, (int, float))]
    why = f" ({', '.join(numbers)})" if numbers else ""
    return f"{event['step']:>9,}  {name}{describe(event)}{why}\n"
