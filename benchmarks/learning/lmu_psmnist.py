"""Permuted sequential MNIST: test accuracy by epoch of the parallel network and the nonlinear cell.

    python benchmarks/learning/lmu_psmnist.py --work DIR --units parallel cell

Each run is `recipes/psmnist.py` in DIR/<unit>-<seed>; the same command resumes, and --report shows the progress without
training. Writes benchmarks/results/lmu_psmnist_parallel.json and lmu_psmnist_cell.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.report import write_report
from recipes.psmnist import PRESETS, Config, main
from toolkit.run.tracking.jsonl import read_metrics

PUBLISHED = {"parallel": 98.49, "cell": 97.15}
"""Published test accuracy in percent: Chilkuri and Eliasmith 2021, and Voelker et al. 2019."""


def curve(folder: Path) -> list[float]:
    """Return the test accuracy in percent after each epoch."""
    path = folder / "metrics.jsonl"
    lines = list(read_metrics(path)) if path.exists() else []
    return [round(100 * line["eval/accuracy"], 2) for line in lines if "eval/accuracy" in line]


def measure(unit: str, seed: int, args: argparse.Namespace) -> dict[str, object]:
    folder = args.work / f"{unit}-{seed}"
    config: Config = PRESETS[unit]().replace(seed=seed, dataset="mnist", data_dir=args.data_dir, run_dir=folder)
    if args.epochs is not None:
        config = config.replace(epochs=args.epochs)
    if not (args.report or (folder / "results.json").exists()):
        main(config.replace(tracker="none"))
    found = curve(folder)
    return {
        "unit": unit,
        "seed": seed,
        "epochs done": len(found),
        "of": config.epochs,
        "test accuracy %": found[-1] if found else None,
        "published %": PUBLISHED[unit],
        "curve": found,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; finished runs are not repeated")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with mnist/. Default: $TOOLKIT_DATA_DIR")
    parser.add_argument("--units", nargs="+", choices=sorted(PUBLISHED), default=["parallel"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=None, help="Default: as in the preset")
    parser.add_argument("--report", action="store_true", help="report finished epochs without training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for unit in args.units:
        write_report(f"lmu_psmnist_{unit}", [measure(unit, seed, args) for seed in range(args.seeds)])
