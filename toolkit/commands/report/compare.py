"""`toolkit compare`: runs side by side in the terminal: settings, final numbers, and one process against several."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands.report.comparison import as_json, differing, final_rows, is_compared, summary_rows
from toolkit.commands.report.processes import process_notices, process_rows, process_tables
from toolkit.commands.report.records import readable_runs
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, printable
from toolkit.run.arguments import Parser
from toolkit.run.markdown import markdown_table
from toolkit.run.tracking.jsonl import to_json


def main(argv: Sequence[str]) -> int:
    """Return 0 if the tables are printed, 2 for bad input, with an error for each folder without a run."""
    parser = Parser("toolkit compare", __doc__)
    parser.add_argument("run", nargs="+", type=Path, help="the folder of a run, finished or not")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    args = parser.parse_args(argv)
    runs = readable_runs(args.run)
    if runs is None:
        return EXIT_USER_ERROR
    if args.json:
        sys.stdout.write(to_json(as_json(runs) | {"processes": process_rows(runs)}, indent=2) + "\n")
        return EXIT_DONE
    differ = [name for name in differing(runs) if is_compared(name)]
    sys.stdout.write(printable(markdown_table(summary_rows(runs, differ), aligned=True)))
    if any(run.finished for run in runs):
        sys.stdout.write("\nFinished runs, one row for runs that differ only in the seed:\n\n")
        sys.stdout.write(printable(markdown_table(final_rows(runs), aligned=True)))
    for rows in process_tables(runs):
        sys.stdout.write("\nThe same training on several numbers of processes:\n\n")
        sys.stdout.write(printable(markdown_table(rows, aligned=True)))
    notices = [f"{run.name}: {notice}\n" for run in runs for notice in run.notices]
    notices += [f"{notice}\n" for notice in process_notices(runs)]
    sys.stdout.write(printable("".join(["\n", *notices])) if notices else "")
    return EXIT_DONE
