"""`toolkit sweep`: a grid of runs of one recipe, one after another or several at a time, with tables and pictures."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED, UserError
from toolkit.run.arguments import Parser
from toolkit.run.console import log_line

EXAMPLE = """
  toolkit sweep --grid labels=100,600 --grid corruption-rate=0,0.2 --num-seeds 5 recipes/vae_robustness.py full --cpu
"""
METRIC, SEARCHED = "test_accuracy", "validation_accuracy"
"""What is drawn, and what is searched for, where --metric names nothing else."""


def main(argv: Sequence[str]) -> int:
    """0 where all runs are done, 1 where some failed, 2 for bad input, 75 where the same command has more to do."""
    args = _arguments(argv)

    from filelock import FileLock

    from toolkit.commands.sweep.cells import CellRunner, Outcome
    from toolkit.commands.sweep.grid import grid_cells, parse_axes
    from toolkit.run.pictures.sweep_plots import draw_sweep
    from toolkit.run.recipe_script import load_recipe
    from toolkit.run.runs_table import Table, gather, write_tables

    if args.search and re.match("(best_)?test_", args.metric or SEARCHED):
        name = args.metric.replace("test_", "validation_", 1)
        raise UserError(f"--metric {args.metric}: a search must not choose by the test data: take {name}.")
    recipe = load_recipe(args.recipe, [*args.arguments, *(["--validation"] if args.search else [])])
    axes = parse_axes(args.grid)
    first = recipe.config(()).seed + args.seed_offset
    cells = grid_cells(recipe, axes, range(first, first + args.num_seeds))
    folder = args.out / "cells"
    metric = args.metric or (SEARCHED if args.search else METRIC)
    runner = CellRunner(recipe, folder, jobs=args.jobs, log=log_line)

    def write() -> Table:
        with FileLock(args.out / ".tables.lock"):  # the tasks of an array share the tables
            table = gather(folder, axes)
            write_tables(table, args.out)
            draw_sweep(args.out / "sweep.png", metric, table.axes, table.runs, table.means())
        return table

    outcome = Outcome()
    if not args.collect:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {args.out}: cannot be written ({error.strerror}): choose another.") from None
        if args.search is None:
            outcome = runner.run(cells, finished=lambda _: write())
        else:
            from toolkit.commands.sweep.search import search

            outcome = search(
                runner,
                axes,
                trials=args.search,
                metric=metric,
                minimise=args.minimise,
                seed=first,
                journal=args.out / "search.journal",
                log=log_line,
            )
    elif not folder.is_dir():
        raise UserError(f"--out {args.out}: holds no sweep: leave --collect out to begin one.")
    table = write()
    sys.stdout.write((args.out / "table.md").read_text(encoding="utf-8"))
    if table.runs and metric not in table.metrics:
        line = f"--metric {metric}: the runs have no such number to draw: take one of {', '.join(table.metrics)}"
        if args.metric and args.search is None:  # which takes numbers of other names, too
            raise UserError(f"{line}.")
        log_line(f"no sweep.png: {line}")
    if outcome.elsewhere:
        log_line(f"{len(outcome.elsewhere)} runs are another job's")
    if outcome.stopped:
        log_line("stopped: run the same command again to continue.")
        return EXIT_PREEMPTED
    return EXIT_BUG if outcome.failed else EXIT_DONE


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """`argv`, parsed. Raises UserError for a number that is too small."""
    parser = Parser("toolkit sweep", __doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--grid", action="append", default=[], metavar="FLAG=A,B", help="an axis: a flag of the recipe and its values"
    )
    parser.add_argument("--num-seeds", type=int, default=1, metavar="N", help="seeds per cell (1)")
    parser.add_argument(
        "--seed-offset", type=int, default=0, metavar="N", help="first seed, counted from the recipe's --seed (0)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"), help="folder of the sweep (runs/sweep)")
    parser.add_argument("--metric", help=f"what is drawn ({METRIC}), or searched for ({SEARCHED})")
    parser.add_argument(
        "--search", type=int, metavar="TRIALS", help="let Optuna choose so many cells instead of running all"
    )
    parser.add_argument("--minimise", action="store_true", help="a lower --metric is better")
    parser.add_argument("--collect", action="store_true", help="run nothing, write tables of what is there")
    parser.add_argument("recipe", type=Path, help="a script with presets, such as recipes/mnist_moe.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="a preset and flags for every run")
    args = parser.parse_args(argv)
    for name, least in (("num_seeds", 1), ("seed_offset", 0), ("jobs", 1), ("search", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: take {least} or more.")
    return args
