"""Load and placement of experts over the steps of a run, and what happened to them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.commands.report.records import RunRecord
from toolkit.run.pictures.plots import LOAD_PREFIX, MOST_LAYERS, spread
from toolkit.run.runs_table import is_number
from toolkit.run.summary import RESTART_REASON
from toolkit.run.tracking.lifecycle_records import describe

PLACEMENT_PREFIX = "moe/placement/"
CELLS_OF_A_PAGE = 600_000
"""Loads of all runs, layers, experts and positions of the slider together; a byte each."""
MOST_POSITIONS = 120
"""Of the slider."""
MOST_EVENTS = 200
"""Of one run, evenly spread where there were more."""


@dataclass(frozen=True)
class Placement:
    """Where the experts of a layer are from a step on."""

    step: int
    ranks: Sequence[Sequence[int]]
    """The logical experts on each rank."""
    uids: Sequence[int | None] | None = None
    """Of each logical expert, where experts are dynamic."""


def layers_of(run: RunRecord) -> list[str]:
    """The layers with experts that the metrics have loads of; of a deeper model some, evenly spread."""
    names = dict.fromkeys(name for line in run.lines for name in line if name.startswith(LOAD_PREFIX))
    layers = [name.removeprefix(LOAD_PREFIX) for name in names]
    return spread([layer for layer in layers if any(_shares(line, layer) for line in run.lines)], MOST_LAYERS)


def loads_of(run: RunRecord, layer: str, most: int) -> tuple[list[int], np.ndarray]:
    """At most `most` steps (T), and float64 (T, E): shares of the assignments, means over the lines up to each step."""
    points = [(line["step"], shares) for line in run.lines if (shares := _shares(line, layer))]
    table = np.zeros((len(points), max(len(shares) for _, shares in points)))
    for row, (_, shares) in zip(table, points, strict=True):
        row[: len(shares)] = shares
    parts = np.array_split(np.arange(len(points)), min(most, len(points)))
    return [points[part[-1]][0] for part in parts], np.stack([table[part].mean(axis=0) for part in parts])


def placements_of(run: RunRecord, layer: str) -> list[Placement]:
    """Returns placements by step: from metrics where a planner moves experts, from lifecycle.jsonl where they are
    dynamic, otherwise the one of results.json. Empty where the run has noted none."""
    name = PLACEMENT_PREFIX + layer
    found = [Placement(line["step"], line[name]) for line in run.lines if name in line]
    for epoch in run.epochs:
        if (state := epoch.layers.get(layer)) is not None:
            uids = list(state.uids_of_logical)
            ranks = [
                [expert for expert in row if expert >= 0 and uids[expert] is not None] for row in state.logical_on_ranks
            ]
            found.append(Placement(epoch.step, ranks, uids))
    placed = run.results.get("expert_placement")
    final = placed.get(layer) if isinstance(placed, Mapping) else None
    if not found and final:
        found.append(Placement(0, final))
    return sorted(found, key=lambda placement: placement.step)


def viewer_data(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """For each run with experts its layers, each with steps, loads and placements, as the page's script reads them.

    Loads are bytes (T, E) in base64, 255 for `peak`.
    """
    cells = sum(_experts(run, layer) for run in runs for layer in layers_of(run))
    most = max(10, min(MOST_POSITIONS, CELLS_OF_A_PAGE // max(1, cells)))
    return [
        {"run": index, "layers": [_layer_data(run, layer, most) for layer in layers]}
        for index, run in enumerate(runs)
        if (layers := layers_of(run))
    ]


def _layer_data(run: RunRecord, layer: str, most: int) -> dict[str, Any]:
    steps, loads = loads_of(run, layer, most)
    peak = float(loads.max()) or 1.0
    placements = placements_of(run, layer)
    return {
        "name": layer or "moe",
        "steps": steps,
        "experts": loads.shape[1],
        "peak": peak,
        "loads": base64.b64encode(np.rint(loads / peak * 255).astype(np.uint8).tobytes()).decode(),
        "placements": [{"step": p.step, "ranks": p.ranks, "uids": p.uids} for p in placements],
    }


def _experts(run: RunRecord, layer: str) -> int:
    return max(len(_shares(line, layer)) for line in run.lines)


def _shares(line: Mapping[str, Any], layer: str) -> list[float]:
    """The loads of `layer` on a line of metrics, 0 for what is no number; empty where it has none."""
    shares = line.get(LOAD_PREFIX + layer)
    return [share if is_number(share) else 0.0 for share in shares] if isinstance(shares, list) else []


@dataclass(frozen=True)
class Event:
    """One line in the table of events."""

    run: int
    step: int | None
    """None for a start, of which the time is known."""
    kind: str
    text: str


def events_of(runs: Sequence[RunRecord]) -> list[Event]:
    """Starts, migrations, and changes of dynamic experts, of each run in this order."""
    found = []
    for index, run in enumerate(runs):
        for number, start in enumerate(run.starts):
            kind = "started again" if number else "start"
            found.append(
                Event(index, None, kind, f"{start.get('started', '')}, {start.get('hardware', '')}".strip(", "))
            )
        found += spread(sorted(_changes(index, run), key=lambda event: event.step or 0), MOST_EVENTS)
    return found


def _changes(index: int, run: RunRecord) -> Iterable[Event]:
    for line in run.lines:
        if experts := line.get("moe/migrated_experts"):
            size = line.get("moe/migration_bytes")
            size = size if is_number(size) else 0
            yield Event(index, line["step"], "migration", f"{experts} experts moved, {size / 1e6:.2f} MB")
        if reason := line.get(RESTART_REASON):
            yield Event(index, line["step"], "restart", str(reason))
        if refused := line.get("moe/plans_refused"):
            yield Event(index, line["step"], "plan refused", f"{refused} by the guard")
    for epoch in run.epochs:
        for event in epoch.events:
            state = epoch.layers.get(event["layer"]) or next(iter(epoch.layers.values()))
            layer = f"{event['layer']}: " if event["layer"] else ""
            yield Event(index, event["step"], event["kind"], layer + describe(event, state))
