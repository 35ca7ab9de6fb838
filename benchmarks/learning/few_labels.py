"""MNIST with 100 labels: FixMatch with virtual adversarial training (VAT), only VAT, and only labelled images.

    python benchmarks/learning/few_labels.py --data-dir DIR   ten seeds per method; resumes
    python benchmarks/learning/few_labels.py --collect        the table of finished runs, also in docs/recipes/vae.md

A `toolkit sweep` of the presets of recipes/few_labels.py. Each seed draws its own labelled images. Steps, network and
schedule are the same for all methods; the other settings are the best of four trials per method on 5,000 held-out
training images. The test set is evaluated once per seed. Writes benchmarks/results/few_labels.json.
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
    """Return a row for each combination of settings with finished runs."""
    table = gather(folder / "cells", ["method"], metrics=METRICS)
    return [{axis: mean[axis] for axis in table.axes} | summary(table.runs_of(mean)) for mean in table.means()]


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean, standard deviation and each seed of the error in percent, and median training minutes."""
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
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST. Default: $TOOLKIT_DATA_DIR or the Hub")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs of one thread each. Default: 1")
    parser.add_argument("--collect", action="store_true", help="only write the table of finished runs")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    usual = ["--jobs", str(args.jobs), *(["--collect"] if args.collect else [])]
    flags = ["--cpu", "--mixed-precision", "bf16", "--tracker", "none", "--log-every", "100", "--checkpoint.keep", "1"]
    flags += ["--eval-every", "1000"]  # only at the end
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
    if args.collect:  # runs do not change pages, so the commit stays clean
        put_tables(PAGE, "learning/few_labels.py", f"<!-- figures: few_labels.json by method -->\n{markdown(rows)}")
