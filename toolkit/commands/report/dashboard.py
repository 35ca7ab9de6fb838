"""`toolkit dashboard`: a workspace of W&B for the runs of a project, with a panel per metric."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.commands.report.curves import OPEN_AT_FIRST, curves_by_metric, heading, page_order
from toolkit.commands.report.records import RunRecord, readable_runs
from toolkit.compat import workspace_as_json
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, one_line
from toolkit.run.arguments import Parser
from toolkit.run.runs_table import is_number
from toolkit.run.tracking.guard import LONGEST_LIST
from toolkit.run.tracking.jsonl import last_tables
from toolkit.run.tracking.metric_names import picture_name

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

STEP = "step"
"""Metric on the x-axis of every panel: W&B's own step cannot go back when a run is continued."""
COLUMNS = ("config:seed", "config:lr", "config:batch_size")
"""Columns of the run list, after the evaluation metrics."""


@dataclass(frozen=True)
class Metrics:
    """Contents of the panels."""

    numbers: Sequence[str]
    """Metrics with curves, and lists of more than `LONGEST_LIST` values, whose histograms over steps are heat maps."""
    lists: Sequence[str]
    """Metrics with one value per expert, in W&B as name/00, name/01, ..."""
    pictures: Sequence[str]
    tables: Sequence[str]


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
    pictures=("plots/loss", "plots/expert_load", "plots/expert_placement", "plots/expert_moves", "plots/rank_load"),
    tables=("results",),
)
"""Default metrics of a project without local runs; panels of missing metrics stay empty."""


def main(argv: Sequence[str]) -> int:
    """Return 0 if the workspace is saved or printed, 2 for bad input or if W&B does not answer."""
    parser = Parser("toolkit dashboard", __doc__)
    parser.add_argument("service", choices=["wandb"], help="service that shows the dashboard")
    parser.add_argument(
        "what", metavar="RUN|[ENTITY/]PROJECT", help="a run's folder, for its project and metrics, or a W&B project"
    )
    parser.add_argument("--entity", help="the user or team that has the project ($WANDB_ENTITY)")
    parser.add_argument("--dry-run", action="store_true", help="print the workspace as JSON, without network access")
    args = parser.parse_args(argv)

    from toolkit.run.tracking.trackers import why_offline  # with W&B and Accelerate

    entity, _, project = args.what.rpartition("/")
    metrics = USUAL
    if Path(args.what).is_dir():
        runs = readable_runs([Path(args.what)])
        if runs is None:
            return EXIT_USER_ERROR
        config = runs[0].config
        entity, project = "", str(config.get("project") or config.get("recipe", ""))
        metrics = metrics_of(runs[0])
    elif not re.fullmatch(r"([\w-]+/)?[\w.-]+", args.what):
        raise UserError(f"{args.what}: is neither the folder of a run nor [ENTITY/]PROJECT. Give one of them.")
    entity = entity or args.entity or os.environ.get("WANDB_ENTITY", "")
    workspace = make_workspace(entity, project, metrics)
    if args.dry_run:
        sys.stdout.write(workspace_as_json(workspace) + "\n")
        return EXIT_DONE
    if not entity:
        raise UserError(f"{args.what}: the owner of {project} is not known. Give --entity, or set WANDB_ENTITY.")
    if reason := why_offline():
        raise UserError(f"W&B cannot be reached: {reason}. --dry-run prints the workspace.")
    try:
        workspace.save()
    except Exception as error:  # errors of W&B's client or server
        raise UserError(
            f"W&B rejects the workspace ({type(error).__name__}: {one_line(error)}). "
            f"Check that {entity} has a project {project}."
        ) from error
    sys.stdout.write(f"{workspace.url}: {len(workspace.sections)} sections\n")
    return EXIT_DONE


def metrics_of(run: RunRecord) -> Metrics:
    """Return the metrics of `run` in page order. Raises UserError if there are none."""
    lengths = {
        name: len(value)
        for line in run.lines
        for name, value in line.items()
        if isinstance(value, list) and value and all(is_number(item) for item in value)
    }
    numbers = list(curves_by_metric([run]))
    if not numbers:
        raise UserError(f"{run.folder}: has no metrics yet. Train it, or name a project.")
    numbers += [name for name, length in lengths.items() if length > LONGEST_LIST]
    return Metrics(
        numbers,
        lists=sorted(lengths.keys() - numbers),
        pictures=[picture_name(path) for path in sorted(run.folder.glob("*.png"))],
        tables=["results", *last_tables(run.lines)],
    )


def make_workspace(entity: str, project: str, metrics: Metrics) -> Workspace:
    """Return the workspace; its `save()` sends it to W&B. Raises UserError without the library."""
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise UserError(
            "toolkit dashboard: wandb-workspaces is missing. Run pip install 'moe-toolkit[dashboard]'."
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
    sections += [
        ws.Section(
            name="Pictures",
            panels=[panels.MediaBrowser(title=name, media_keys=[name]) for name in metrics.pictures],
            is_open=True,
        ),
        ws.Section(name="Tables", panels=[panels.WeavePanelSummaryTable(table_name=name) for name in metrics.tables]),
    ]
    columns = [f"summary:{name}" for name in metrics.numbers if name.startswith("eval/")]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"{project}: toolkit",
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP),
        runset_settings=ws.RunsetSettings(pinned_columns=["run:displayName", *columns, *COLUMNS]),
    )
