"""Few and wrong labels: the sweeps of docs/recipes/vae.md. Hours on two cores; resumes.

    python benchmarks/learning/vae_robustness.py --out runs/vae           all sweeps, one run at a time
    python benchmarks/learning/vae_robustness.py --out runs/vae labels    one sweep
    python benchmarks/learning/vae_robustness.py --out runs/vae --collect  tables of finished runs

Each sweep is a `toolkit sweep` of recipes/vae_robustness.py, with tables and a plot in a folder below --out. MNIST is
located as in recipes. Writes benchmarks/results/vae_<sweep>.json with the finished runs of each sweep.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.commands.sweep.command import main as sweep
from toolkit.run.runs_table import gather

RECIPE = str(ROOT / "recipes" / "vae_robustness.py")
MANY = ["--grid", "labels=600,1000,3000", "--num-seeds", "3"]
FEW = ["--grid", "labels=100", "--num-seeds", "5"]
CONTROLS = ["--grid", "objective=supervised,pseudo_label"]
WRONG = ["--grid", "corruption=resampled,fixed", "--grid", "corruption-rate=0.2,0.5", "--num-seeds", "3"]
PUBLISHED = ["--grid", "supervision-weight=50,100", "--grid", "labels=600,1000,3000", "--num-seeds", "10"]
FASHION = [
    "--grid",
    "labels=100,600,1000,3000",
    "--grid",
    "objective=exact,supervised,pseudo_label",
    "--num-seeds",
    "3",
]
SWEEPS: dict[str, list[list[str]]] = {
    "labels": [
        [*MANY, RECIPE, "full"],
        [*FEW, RECIPE, "full"],
        [*CONTROLS, *MANY, RECIPE, "full"],
        [*CONTROLS, *FEW, RECIPE, "full"],
    ],
    "corruption": [[*WRONG, RECIPE, "full", "--labels", "3000"]],
    "elbo": [["--num-seeds", "3", RECIPE, "full", "--labels", "3000", "--epochs", "30"]],
    "reference": [[*PUBLISHED, RECIPE, "reference"]],
    "fashion": [[*FASHION, RECIPE, "full", "--dataset", "fashion_mnist"]],
}
METRICS = [
    "test_accuracy",
    "test_logit_accuracy",
    "test_loss",
    "mig",
    "one_style_probe",
    "all_styles_probe",
    "samples_per_second",
]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each cell of a sweep with finished runs."""
    table = gather(folder / "cells", metrics=METRICS)
    rows = []
    for mean in table.means():
        key = {axis: mean[axis] for axis in table.axes}
        runs = table.runs_of(mean)
        errors = [round(100 * (1 - run["test_accuracy"]), 2) for run in runs]
        row: dict[str, Any] = {"cell": " ".join(f"{axis}={value}" for axis, value in key.items())}
        row |= {"runs": mean["runs"], "test error %": round(100 * (1 - mean["test_accuracy mean"]), 2)}
        row |= {"sd": None if len(runs) < 2 else round(100 * mean["test_accuracy sd"], 2), "each seed": errors}
        row |= {**key, **accuracy_of(errors)}
        for metric in METRICS[1:]:
            value = mean.get(f"{metric} mean")
            row[metric] = None if value is None else round(value, 3)
        rows.append(row)
    return rows


def accuracy_of(errors: Sequence[float]) -> dict[str, Any]:
    """Return accuracy in percent for errors in percent, with the standard error of the mean."""
    standard_error = round(statistics.stdev(errors) / len(errors) ** 0.5, 2) if len(errors) > 1 else None
    return {
        "accuracy %": round(100 - statistics.mean(errors), 2),
        "accuracy of each seed": [round(100 - error, 2) for error in errors],
        "standard error": standard_error,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", help=f"{', '.join(SWEEPS)}. Default: all except fashion")
    parser.add_argument("--out", type=Path, default=Path("runs/vae"))
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs. Default: 1")
    parser.add_argument("--collect", action="store_true", help="only write tables of finished runs")
    parser.add_argument("--flags", default="--cpu --mixed-precision bf16", help="flags of the recipe for every run")
    args = parser.parse_args()
    names = args.sweeps or [name for name in SWEEPS if name != "fashion"]
    if unknown := set(names) - set(SWEEPS):
        parser.error(f"unknown sweep {', '.join(sorted(unknown))}. Choose from: {', '.join(SWEEPS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    common = ["--tracker", "none", "--log-every", "200", "--checkpoint.keep", "1", *args.flags.split()]
    for name in names:
        for words in SWEEPS[name]:
            options = ["--collect"] if args.collect else ["--jobs", str(args.jobs)]
            if args.collect and not (args.out / name / "cells").is_dir():
                continue
            if code := sweep(["--out", str(args.out / name), *options, *words, *common]):
                sys.exit(code)
    for name in names:
        if (args.out / name / "cells").is_dir():
            write_report(f"vae_{name}", rows_of(args.out / name), flags=args.flags)
