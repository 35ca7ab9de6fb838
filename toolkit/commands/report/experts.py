"""Plots of runs, and the events of their experts and processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.commands.report.records import RunRecord
from toolkit.dynamic.plots import experts_by_uid
from toolkit.run.pictures.plots import PLACEMENT_PREFIX, Experts, by_layer, draw_experts, spread
from toolkit.run.runs_table import is_number
from toolkit.run.summary import RESTART_REASON, moves

MOST_PLOTS = 20
"""Plots of one run."""
MOST_EVENTS = 200
"""Events of one run, evenly spaced if there were more."""


def plots_of(run: RunRecord, folder: Path) -> list[Path]:
    """Return the plots in the folder of `run`. If it has none yet, draw those of its experts to `folder`."""
    plots = [path for path in sorted(run.folder.glob("*.png")) if path.is_file() and not path.is_symlink()]
    if plots:
        return plots[:MOST_PLOTS]
    moved = {layer: points for layer, points in by_layer(run.lines, PLACEMENT_PREFIX).items() if len(points) > 1}
    so_far = {
        "placement_before_moves": {layer: points[0][1] for layer, points in moved.items()},
        "expert_placement": {layer: points[-1][1] for layer, points in moved.items()},
    }
    experts = Experts.of(run.lines, {**so_far, **run.results})
    if run.epochs:
        experts = experts_by_uid(experts, run.epochs[-1].layers, run.results.get("first_move_step", 0))
    return list(draw_experts(folder, experts, run.lines, moves(run.results)).values())


def event_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return a header and a row for each migration, restart and change of dynamic experts of each run, by step."""
    rows = [["run", "step", "event", ""]]
    for run in runs:
        events = sorted(_events(run), key=lambda event: event[0])
        rows += [[run.name, f"{step:,}", kind, text] for step, kind, text in spread(events, MOST_EVENTS)]
    return rows


def _events(run: RunRecord) -> Iterator[tuple[int, str, str]]:
    """Yield step, kind and description."""
    for line in run.lines:
        if experts := line.get("moe/migrated_experts"):
            size = line.get("moe/migration_bytes")
            size = size if is_number(size) else 0
            yield line["step"], "migration", f"{experts} experts moved, {size / 1e6:.2f} MB"
        if reason := line.get(RESTART_REASON):
            yield line["step"], "restart", str(reason)
        if refused := line.get("moe/plans_refused"):
            yield line["step"], "plan refused", f"{refused} by the guard"
    yield from run.events
