"""Digits from 100 labels: FixMatch with virtual adversarial training, the latter alone, and labelled images alone.

    python benchmarks/learning/few_labels.py --data-dir DIR   ten seeds of each; goes on where it was stopped
    python benchmarks/learning/few_labels.py --collect        the table of what has been run, and in docs/recipes/vae.md

A `toolkit sweep` of the presets of recipes/few_labels.py. Each seed draws its own labelled images. Steps, network and
schedule are the same for all methods; the other settings did best in four trials of each method on 5,000 held-out
training images. The test set is read once for each seed. Writes benchmarks/results/few_labels.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import markdown, put_tables, sd, write_report
from toolkit.commands.sweep.command import main as sweep
from toolkit.errors import EXIT_PREEMPTED
from toolkit.run.runs_table import gather

RECIPE = str(ROOT / "recipes" / "few_labels.py")
PAGE = ROOT / "docs" / "recipes" / "vae.md"
METHODS = ("fixmatch_vat", "vat", "supervised")
METRICS = ("test_accuracy", "train_seconds")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """A row per combination of settings, as far as it has been run: errors in percent, seed by seed."""
    table = gather(folder / "cells", ["method"], metrics=METRICS)
    return [{axis: mean[axis] for axis in table.axes} | summary(table.runs_of(mean)) for mean in table.means()]


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Error of each seed, their mean and standard deviation (of a sample); minutes of training, the median."""
    runs = sorted(runs, key=lambda run: run["seed"])
    errors = [100 * (1 - run["test_accuracy"]) for run in runs]
    return {
        "runs": len(runs),
        "error %": round(statistics.fmean(errors), 2),
        "sd": sd(errors, 2),
        "each seed": [round(error, 2) for error in errors],
        "minutes": round(statistics.median(run["train_seconds"] for run in runs) / 60, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "few_labels")
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST; else $TOOLKIT_DATA_DIR or the Hub")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each (1)")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    usual = ["--jobs", str(args.jobs), *(["--collect"] if args.collect else [])]
    flags = ["--cpu", "--mixed-precision", "bf16", "--tracker", "none", "--log-every", "100", "--checkpoint.keep", "1"]
    flags += ["--eval-every", "1000"]  # at the end alone
    if args.data_dir is not None:
        flags += ["--data-dir", str(args.data_dir)]
    flags += ["--dataset", "mnist"]
    out = args.out / "few_labels"
    for method in METHODS:
        words = ["--num-seeds", str(args.seeds), RECIPE, method]
        if sweep(["--out", str(out), *usual, *words, *flags]) == EXIT_PREEMPTED:
            sys.exit(EXIT_PREEMPTED)
    rows = rows_of(out)
    write_report("few_labels", rows)
    if args.collect:  # a run leaves the pages alone, so that the next is of an unchanged commit
        put_tables(PAGE, "learning/few_labels.py", f"<!-- figures: few_labels.json by method -->\n{markdown(rows)}")
