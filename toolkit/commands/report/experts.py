"""Load, placement and events of experts, by uid, over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.commands.report.records import RunRecord
from toolkit.dynamic.records import LayerState, describe
from toolkit.run.pictures.plots import LOAD_PREFIX, MOST_LAYERS, PLACEMENT_PREFIX, spread
from toolkit.run.runs_table import is_number
from toolkit.run.summary import RESTART_REASON

CELLS_OF_A_PAGE = 200_000
"""Experts times columns of all load plots together."""
MOST_COLUMNS, FEWEST_COLUMNS = 120, 10
"""Columns of a load plot; each column covers an equal number of log steps."""
MOST_EVENTS = 200
"""Events of one run, evenly spaced if there were more."""
Placement = tuple[int, Sequence[Sequence[int]]]
"""A step, and the experts on each rank from this step on, by uid."""


@dataclass(frozen=True)
class Layer:
    """Load and placement of the experts (E) of one layer of a run."""

    run: int
    """Index of the run."""
    name: str
    load_steps: list[int]
    """The T + 1 step boundaries of the columns of `shares_ET`."""
    shares_ET: np.ndarray
    """float32: shares of assignments, means over log steps; NaN if the expert was inactive."""
    placement_steps: list[int]
    """The P + 1 step boundaries of the columns of `ranks_EP`."""
    ranks_EP: np.ndarray
    """float32: the first rank that has the expert; NaN if no rank has it."""


def layers_of(runs: Sequence[RunRecord]) -> list[Layer]:
    """Return the layers with logged expert load; at most `MOST_LAYERS` per run, evenly spaced."""
    found = []
    for index, run in enumerate(runs):
        names = dict.fromkeys(name for line in run.lines for name in line if name.startswith(LOAD_PREFIX))
        loads = {name: points for name in names if (points := list(_loads(run, name)))}
        found += [(index, name, loads[name]) for name in spread(list(loads), MOST_LAYERS)]
    experts = sum(max(len(shares) for _, shares in points) for _, _, points in found)
    most = max(FEWEST_COLUMNS, min(MOST_COLUMNS, CELLS_OF_A_PAGE // max(1, experts)))
    return [_layer(index, runs[index], name.removeprefix(LOAD_PREFIX), points, most) for index, name, points in found]


def _loads(run: RunRecord, name: str) -> Iterator[tuple[int, list[float]]]:
    """Yield the log steps with loads under `name`, and the loads by uid, NaN for inactive experts."""
    state = _last_state(run, name.removeprefix(LOAD_PREFIX))
    for line in run.lines:
        shares = line.get(name)
        if isinstance(shares, list) and shares:
            by_uid = state.by_uid(shares, line["step"]) if state else shares
            yield line["step"], [share if is_number(share) else math.nan for share in by_uid]


def _last_state(run: RunRecord, layer: str) -> LayerState | None:
    """Return the last known state of the experts of `layer`; None if they are not dynamic."""
    return run.epochs[-1].layers.get(layer) if run.epochs else None


def _layer(index: int, run: RunRecord, name: str, points: Sequence[tuple[int, list[float]]], most: int) -> Layer:
    experts = max(len(shares) for _, shares in points)
    last_step = points[-1][0]
    parts = np.array_split(np.arange(len(points)), min(most, len(points)))
    shares_NE = np.full((len(points), experts), np.nan, dtype=np.float32)
    for row, (_, shares) in zip(shares_NE, points, strict=True):
        row[: len(shares)] = shares
    known = np.ma.masked_invalid(shares_NE)
    shares_ET = np.stack([known[part].mean(0).filled(np.nan) for part in parts], axis=1)
    placements = placements_of(run, name) or [(0, [range(experts)])]
    ranks_EP = np.full((experts, len(placements)), np.nan, dtype=np.float32)
    for column, (_, ranks) in enumerate(placements):
        for rank, held in reversed(list(enumerate(ranks))):
            ranks_EP[list(held), column] = rank
    placement_steps = [0, *(step for step, _ in placements[1:]), max(last_step, placements[-1][0])]
    load_steps = [0, *(points[part[-1]][0] for part in parts)]
    return Layer(index, name or "moe", load_steps, shares_ET, placement_steps, ranks_EP)


def placements_of(run: RunRecord, layer: str) -> list[Placement]:
    """Return placements by step: from metrics if a planner moves experts, from lifecycle.jsonl for dynamic experts,
    else from results.json. Empty if the run recorded none."""
    name = PLACEMENT_PREFIX + layer
    found = [(line["step"], line[name]) for line in run.lines if name in line]
    if (last := _last_state(run, layer)) is not None:
        found = [(step, last.rows_by_uid(rows, step + 1)) for step, rows in found]
    for epoch in run.epochs:
        if (state := epoch.layers.get(layer)) is not None:
            found.append((epoch.step, state.uids_on_ranks))
    placed = run.results.get("expert_placement")
    final = placed.get(layer) if isinstance(placed, Mapping) else None
    if not found and final:
        found.append((0, final))
    return sorted(found, key=lambda placement: placement[0])


@dataclass(frozen=True)
class Event:
    """One line in the table of events."""

    run: int
    step: int
    kind: str
    text: str


def events_of(runs: Sequence[RunRecord]) -> list[Event]:
    """Return the migrations, restarts and changes of dynamic experts of each run, by step."""
    found = []
    for index, run in enumerate(runs):
        found += spread(sorted(_changes(index, run), key=lambda event: event.step), MOST_EVENTS)
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
