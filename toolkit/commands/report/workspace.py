"""The sheet of `toolkit report` as a workspace of W&B: a section per group of metrics, a panel per metric."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from toolkit.commands.report.curves import OPEN_AT_FIRST, curves_by_metric, heading, page_order
from toolkit.commands.report.records import RunRecord
from toolkit.errors import UserError
from toolkit.run.runs_table import is_number

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

STEP = "step"
"""The metric that every panel has on its horizontal axis: W&B's own step refuses to go back with a run."""
COLUMNS = ("config:seed", "config:lr", "config:batch_size")
"""Of the list of runs, after the last evaluation."""


@dataclass(frozen=True)
class Metrics:
    """What the panels show."""

    numbers: Sequence[str]
    lists: Sequence[str]
    """Those of a number for each expert, which W&B has as name/00, name/01, ..."""
    pictures: Sequence[str]


USUAL = Metrics(
    numbers=(
        "train/loss",
        "train/accuracy",
        "train/grad_norm",
        "train/learning_rate",
        "eval/loss",
        "eval/accuracy",
        "moe/max_load_over_mean",
        "moe/dead_experts",
        "moe/load_entropy",
        "moe/rank_imbalance",
        "moe/all_to_all_bytes_per_step",
        "moe/migrated_experts",
        "moe/migration_bytes",
        "lifecycle/experts",
        "perf/samples_per_second",
        "perf/step_time_ms",
        "perf/step_time_worst_rank_ms",
        "perf/peak_memory_bytes",
    ),
    lists=("moe/load",),
    pictures=("plots/loss", "plots/expert_load", "plots/expert_placement"),
)
"""Of a project whose runs are not at hand: a panel of a metric that no run has stays empty."""


def metrics_of(run: RunRecord) -> Metrics:
    """Returns what `run` has logged, in the order of the page. Raises UserError where that is nothing."""
    lists = {
        name
        for line in run.lines
        for name, value in line.items()
        if isinstance(value, list) and value and all(is_number(item) for item in value)
    }
    numbers = list(curves_by_metric([run]))
    if not numbers:
        raise UserError(f"{run.folder}: has no metrics yet: train it, or name a project.")
    found = [picture for picture in USUAL.pictures if (run.folder / f"{picture.partition('/')[2]}.png").exists()]
    return Metrics(numbers, sorted(lists), found)


def make_workspace(entity: str, project: str, metrics: Metrics) -> Workspace:
    """The workspace, which nothing is asked or told of before its `save()`. Raises UserError without the library."""
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise UserError(
            "toolkit dashboard needs wandb-workspaces, which is missing: pip install 'moe-toolkit[dashboard]'."
        ) from None

    def panel(name: str) -> Any:
        if name in metrics.lists:
            return panels.LinePlot(title=name, x=STEP, metric_regex=rf"^{re.escape(name)}/.*\d\d$")
        return panels.LinePlot(title=name, x=STEP, y=[name])

    names = sorted({*metrics.numbers, *metrics.lists}, key=page_order)
    sections = [
        ws.Section(name=title, panels=[panel(name) for name in group], is_open=title in OPEN_AT_FIRST)
        for title, group in groupby(names, heading)
    ]
    if metrics.pictures:
        sections.append(
            ws.Section(name="Pictures", panels=[panels.MediaBrowser(media_keys=[name]) for name in metrics.pictures])
        )
    columns = [f"summary:{name}" for name in metrics.numbers if name.startswith("eval/")]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"{project}: toolkit",
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP),
        runset_settings=ws.RunsetSettings(pinned_columns=["run:displayName", *columns, *COLUMNS]),
    )
