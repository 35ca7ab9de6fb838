"""Test accuracy on MNIST: MoE model and dense network with equal active parameters, schedule and seeds.

    python benchmarks/learning/mnist_accuracy.py --data-dir DIR  10 seeds of 1 and 5 epochs; a quarter of an hour
    python benchmarks/learning/mnist_accuracy.py --jobs 2        two processes of one thread each; resumes

Each run is a preset of `recipes/mnist_moe.py`. Tune settings with --dataset mnist:validation, which writes nothing.
Writes benchmarks/results/mnist_accuracy.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.report import COMMIT, markdown, sd, write_report
from recipes.mnist_moe import dense, full, main
from toolkit.run.folder import write_json

ARMS = {"mixture": full, "dense": dense}
RUNS = ROOT / "runs" / "mnist_accuracy" / (COMMIT or "unknown")


@dataclass(frozen=True)
class Job:
    arm: str
    epochs: int
    seed: int
    dataset: str
    data_dir: Path | None


def results(job: Job) -> dict[str, float]:
    """Return the results of a run on one thread, from the cache if the same commit has run it."""
    file = RUNS / f"{job.arm}-{job.dataset}-{job.epochs}-{job.seed}.json"
    if file.exists():
        return json.loads(file.read_text())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = ARMS[job.arm]().replace(
            epochs=job.epochs,
            seed=job.seed,
            dataset=job.dataset,
            data_dir=job.data_dir,
            cpu=True,
            tracker="none",
            run_dir=Path(folder) / "run",
        )
        found = main(config)
    RUNS.mkdir(parents=True, exist_ok=True)
    write_json(file, found)
    return found


def row(arm: str, epochs: int, runs: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Return test accuracy in percent, and expert loads of the last epoch relative to their mean."""
    accuracies = [100 * run["test_accuracy"] for run in runs]
    shown: dict[str, object] = {
        "arm": arm,
        "epochs": epochs,
        "test accuracy %": round(statistics.mean(accuracies), 2),
        "sd": sd(accuracies, 2),
        "each seed": [round(a, 2) for a in accuracies],
    }
    experts = ARMS[arm]().experts
    for name, extreme in (("busiest", max), ("least", min)):
        loads = [round(experts * run[f"{extreme.__name__}_expert_load"], 2) for run in runs] if experts else None
        shown |= {f"{name} expert over mean": extreme(loads) if loads else None, f"{name}, each seed": loads}
    return shown


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-dir", type=Path, default=None, help="folder with MNIST. Default: $TOOLKIT_DATA_DIR or the Hub"
    )
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 10], help="number of seeds for each of --epochs")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    if len(args.seeds) != len(args.epochs):
        parser.error(f"--seeds: needs {len(args.epochs)} numbers, one for each of --epochs.")
    cases = [(epochs, seeds, arm) for epochs, seeds in zip(args.epochs, args.seeds, strict=True) for arm in ARMS]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [
            [pool.submit(results, Job(arm, epochs, seed, args.dataset, args.data_dir)) for seed in range(seeds)]
            for epochs, seeds, arm in cases
        ]
        rows = [
            row(arm, epochs, [run.result() for run in runs])
            for (epochs, _, arm), runs in zip(cases, waiting, strict=True)
        ]
    if args.dataset == "mnist":
        write_report("mnist_accuracy", rows)
    else:
        print(markdown(rows))
