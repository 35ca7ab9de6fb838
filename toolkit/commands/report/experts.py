"""Load and placement of experts, by uid, over the steps of a run, and what happened to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.commands.report.records import RunRecord
from toolkit.dynamic.records import LayerState, describe
from toolkit.run.pictures.plots import LOAD_PREFIX, MOST_LAYERS, spread
from toolkit.run.runs_table import is_number
from toolkit.run.summary import RESTART_REASON

PLACEMENT_PREFIX = "moe/placement/"
CELLS_OF_A_PAGE = 200_000
"""Experts times columns of all pictures together."""
MOST_COLUMNS, FEWEST_COLUMNS = 120, 10
"""Of one picture; each stands for equally many steps."""
MOST_EVENTS = 200
"""Of one run, evenly spread where there were more."""
Placement = tuple[int, Sequence[Sequence[int]]]
"""A step, and the experts on each rank from it on, by uid."""


@dataclass(frozen=True)
class Layer:
    """Load and placement of the experts (E) of one layer in equal parts (T) of a run."""

    run: int
    """Its place among the runs."""
    name: str
    last_step: int
    shares_ET: np.ndarray
    """float32: shares of the assignments, means over the lines of each part; NaN where no rank has the expert."""
    ranks_ET: np.ndarray
    """float32: the first rank that has the expert at the end of the part; NaN where none has it."""


def layers_of(runs: Sequence[RunRecord]) -> list[Layer]:
    """The layers with experts that the metrics have loads of; of a deeper model some, evenly spread."""
    found = []
    for index, run in enumerate(runs):
        names = dict.fromkeys(name for line in run.lines for name in line if name.startswith(LOAD_PREFIX))
        loads = {name: points for name in names if (points := list(_loads(run, name)))}
        found += [(index, name, loads[name]) for name in spread(list(loads), MOST_LAYERS)]
    experts = sum(max(len(shares) for _, shares in points) for _, _, points in found)
    most = max(FEWEST_COLUMNS, min(MOST_COLUMNS, CELLS_OF_A_PAGE // max(1, experts)))
    return [
        _layer(index, runs[index], name.removeprefix(LOAD_PREFIX), points, min(most, len(points)))
        for index, name, points in found
    ]


def _loads(run: RunRecord, name: str) -> Iterator[tuple[int, list[float]]]:
    """The steps that have loads under `name`, and these by uid, 0 for what is no number."""
    state = _last_state(run, name.removeprefix(LOAD_PREFIX))
    for line in run.lines:
        shares = line.get(name)
        if isinstance(shares, list) and shares:
            of_uids = state.by_uid(shares, line["step"]) if state else shares
            yield line["step"], [share if is_number(share) else 0.0 for share in of_uids]


def _last_state(run: RunRecord, layer: str) -> LayerState | None:
    """What is known of the experts of `layer` at last; None where they are not dynamic."""
    return run.epochs[-1].layers.get(layer) if run.epochs else None


def _layer(index: int, run: RunRecord, name: str, points: Sequence[tuple[int, list[float]]], columns: int) -> Layer:
    experts = max(len(shares) for _, shares in points)
    shares_ET = np.zeros((experts, columns), dtype=np.float32)
    ranks_ET = np.full((experts, columns), np.nan, dtype=np.float32)
    ends = np.linspace(0, points[-1][0], columns + 1)[1:]
    column_of = np.searchsorted(ends, [step for step, _ in points])
    first, *later = placements_of(run, name) or [(0, [range(experts)])]
    for column, end in enumerate(ends):
        lines = [shares for (_, shares), of in zip(points, column_of, strict=True) if of == column]
        for shares in lines:
            shares_ET[: len(shares), column] += np.array(shares) / len(lines)
        if not lines and column:
            shares_ET[:, column] = shares_ET[:, column - 1]
        *_, (_, ranks) = [first, *(placement for placement in later if placement[0] <= end)]
        for rank, row in reversed(list(enumerate(ranks))):
            ranks_ET[list(row), column] = rank
    shares_ET[np.isnan(ranks_ET) & (shares_ET == 0)] = np.nan
    return Layer(index, name or "moe", points[-1][0], shares_ET, ranks_ET)


def placements_of(run: RunRecord, layer: str) -> list[Placement]:
    """Returns placements by step: from metrics where a planner moves experts, from lifecycle.jsonl where they are
    dynamic, otherwise the one of results.json. Empty where the run has noted none."""
    name = PLACEMENT_PREFIX + layer
    found = [(line["step"], line[name]) for line in run.lines if name in line]
    if (last := _last_state(run, layer)) is not None:
        uids = {step: last.uids_at(step + 1) for step, _ in found}
        found = [(step, [[uids[step][e] for e in row if e in uids[step]] for row in rows]) for step, rows in found]
    for epoch in run.epochs:
        if (state := epoch.layers.get(layer)) is not None:
            found.append((epoch.step, [[uid for uid in row if uid is not None] for row in state.uids_on_ranks]))
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
