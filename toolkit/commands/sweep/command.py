"""`toolkit sweep`: run a grid of settings of one recipe, with tables and a plot."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED, UserError
from toolkit.run.arguments import Parser, count
from toolkit.run.console import log_line

EXAMPLE = """
  toolkit sweep --grid labels=100,600 --grid corruption-rate=0,0.2 --num-seeds 5 train.py full --cpu
"""
METRIC, SEARCHED = "test_accuracy", "validation_accuracy"
"""The defaults of --metric."""


def main(argv: Sequence[str]) -> int:
    """Return 0 if all runs are done, 1 if some failed, 2 for bad input, 75 if the same command has more to do."""
    args = _arguments(argv)

    from filelock import FileLock

    from toolkit.commands.sweep.cells import CellRunner, Outcome
    from toolkit.commands.sweep.grid import grid_cells, parse_axes
    from toolkit.run.pictures.sweep_plots import draw_sweep
    from toolkit.run.recipe_script import load_recipe
    from toolkit.run.runs_table import Table, gather, write_tables
    from toolkit.run.tracking.metric_names import mode_by_name

    if args.search and re.match("(best_)?test_", args.metric or SEARCHED):
        name = args.metric.replace("test_", "validation_", 1)
        raise UserError(f"--metric {args.metric}: a search must not choose by test data. Take {name}.")
    recipe = load_recipe(args.recipe, [*args.arguments, *(["--validation"] if args.search else [])])
    axes = parse_axes(args.grid)
    first = recipe.config(()).seed + args.seed_offset
    cells = grid_cells(recipe, axes, range(first, first + args.num_seeds))
    folder = args.out / "cells"
    metric = args.metric or (SEARCHED if args.search else METRIC)
    runner = CellRunner(recipe, folder, jobs=args.jobs, log=log_line)

    def write() -> Table:
        with FileLock(args.out / ".tables.lock"):  # the tasks of an array share the tables
            table = gather(folder, axes, metric)
            write_tables(table, args.out)
            draw_sweep(args.out / "sweep.png", metric, table.axes, table.runs, table.means())
        return table

    outcome = Outcome()
    if not args.collect:
        folder.mkdir(parents=True, exist_ok=True)
        if args.search is None:
            outcome = runner.run(cells, finished=lambda _: write())
        else:
            from toolkit.commands.sweep.search import search

            outcome = search(
                runner,
                axes,
                trials=args.search,
                metric=metric,
                minimise=args.minimise or mode_by_name(metric) == "min",
                seed=first,
                journal=args.out / "search.journal",
                log=log_line,
            )
    elif not folder.is_dir():
        raise UserError(f"--out {args.out}: holds no sweep. Leave --collect out to start one.")
    table = write()
    sys.stdout.write((args.out / "table.md").read_text(encoding="utf-8"))
    if table.runs and metric not in table.metrics:
        log_line(f"no sweep.png: no run has --metric {metric}. Take one of {', '.join(table.metrics)}.")
    if outcome.elsewhere:
        log_line(f"{len(outcome.elsewhere)} cells run in other jobs")
    if outcome.stopped:
        log_line("stopped: run the same command again to continue.")
        return EXIT_PREEMPTED
    return EXIT_BUG if outcome.failed else EXIT_DONE


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("toolkit sweep", __doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--grid", action="append", default=[], metavar="FLAG=A,B", help="an axis: a flag of the recipe and its values"
    )
    parser.add_argument("--num-seeds", type=count, default=1, metavar="N", help="seeds per cell (1)")
    parser.add_argument(
        "--seed-offset", type=int, default=0, metavar="N", help="first seed, counted from the recipe's --seed (0)"
    )
    parser.add_argument("--jobs", type=count, default=1, metavar="N", help="runs at a time (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"), help="folder of the sweep (runs/sweep)")
    parser.add_argument("--metric", help=f"metric to plot ({METRIC}) or to search for ({SEARCHED})")
    parser.add_argument(
        "--search", type=count, metavar="TRIALS", help="number of cells that Optuna chooses, instead of the full grid"
    )
    parser.add_argument(
        "--minimise", action="store_true", help="a lower --metric is better, as it is for losses and error rates"
    )
    parser.add_argument("--collect", action="store_true", help="only write the tables of finished runs")
    parser.add_argument("recipe", type=Path, help="a script with presets")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="a preset and flags for every run")
    return parser.parse_args(argv)
