"""`toolkit dashboard`: the sheet of `toolkit report` as a workspace of W&B, for the runs of a project."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands.arguments import Parser
from toolkit.commands.report.compare import readable_runs
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, one_line


def main(argv: Sequence[str]) -> int:
    """0 where the workspace is saved, or printed with --dry-run; 2 for bad input, or where W&B can't be asked."""
    parser = Parser("toolkit dashboard", __doc__)
    parser.add_argument("service", choices=["wandb"], help="where the dashboard is")
    parser.add_argument(
        "what", metavar="RUN|[ENTITY/]PROJECT", help="a run's folder, for its project and metrics, or a W&B project"
    )
    parser.add_argument("--entity", help="the user or team that has the project ($WANDB_ENTITY)")
    parser.add_argument("--dry-run", action="store_true", help="print the workspace as JSON, ask nobody")
    args = parser.parse_args(argv)

    from toolkit.commands.report.workspace import USUAL, make_workspace, metrics_of
    from toolkit.compat import workspace_as_json
    from toolkit.run.tracking.secrets import mask_text
    from toolkit.run.tracking.trackers import why_offline

    entity, _, project = args.what.rpartition("/")
    metrics = USUAL
    if Path(args.what).is_dir():
        runs = readable_runs([Path(args.what)])
        if runs is None:
            return EXIT_USER_ERROR
        entity, project = "", os.environ.get("WANDB_PROJECT", str(runs[0].config.get("recipe", "")))
        metrics = metrics_of(runs[0])
    elif not re.fullmatch(r"([\w-]+/)?[\w.-]+", args.what):
        raise UserError(f"{args.what}: is neither the folder of a run nor [ENTITY/]PROJECT: give one of them.")
    entity = entity or args.entity or os.environ.get("WANDB_ENTITY", "")
    workspace = make_workspace(entity, project, metrics)
    if args.dry_run:
        sys.stdout.write(workspace_as_json(workspace) + "\n")
        return EXIT_DONE
    if not entity:
        raise UserError(f"{args.what}: nobody says whose project {project} is: give --entity, or set WANDB_ENTITY.")
    if reason := why_offline():
        raise UserError(f"W&B cannot be asked ({reason}); --dry-run prints the workspace.")
    try:
        workspace.save()
    except Exception as error:  # of W&B's client, or its answer
        raise UserError(
            f"W&B does not take the workspace ({type(error).__name__}: {mask_text(one_line(error))}): "
            f"has {entity} a project {project}?"
        ) from error
    sys.stdout.write(f"{workspace.url}: {len(workspace.sections)} sections\n")
    return EXIT_DONE
