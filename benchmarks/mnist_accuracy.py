"""Test accuracy on MNIST: the mixture beside a dense network of equal active parameters, same schedule, same seeds.

    python benchmarks/mnist_accuracy.py --data-dir DIR      10 seeds of 1 epoch, 5 of 5; some minutes on a CPU

Writes a table and benchmarks/results/mnist_accuracy.json. Each run is `recipes/mnist_moe.py` with that preset.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from recipes.mnist_moe import dense, full, main


def measure(arm: str, epochs: int, seeds: int, data_dir: Path | None) -> dict[str, object]:
    """Mean and spread of the test accuracy of one arm, in percent, over `seeds` runs."""
    preset = {"mixture": full, "dense": dense}[arm]
    runs = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            config = replace(
                preset(),
                epochs=epochs,
                seed=seed,
                dataset="mnist",
                data_dir=data_dir,
                tracker="none",
                run_dir=Path(folder) / "run",
            )
            runs.append(main(config))
    accuracies = [100 * run["test_accuracy"] for run in runs]
    return {
        "arm": arm,
        "epochs": epochs,
        "test accuracy %": round(statistics.mean(accuracies), 2),
        "sd": round(statistics.stdev(accuracies), 2) if seeds > 1 else None,
        "each seed": [round(a, 2) for a in accuracies],
        "least used expert %": round(100 * min(run["min_expert_load"] for run in runs), 1)
        if arm == "mixture"
        else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-dir", type=Path, default=None, help="folder with MNIST; else $TOOLKIT_DATA_DIR or the Hub"
    )
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 5], help="how many, for each of --epochs")
    args = parser.parse_args()
    if len(args.seeds) != len(args.epochs):
        parser.error(f"--seeds takes as many numbers as --epochs, {len(args.epochs)}")
    rows = [
        measure(arm, epochs, seeds, args.data_dir)
        for epochs, seeds in zip(args.epochs, args.seeds, strict=True)
        for arm in ("mixture", "dense")
    ]
    write_report("mnist_accuracy", rows)
