"""How much of the throughput of perfectly balanced experts a run reaches: the same run with and without
`--force-balanced`, in interleaved rounds.

    python benchmarks/speed/force_balanced.py --data-dir DIR          2 processes on gloo, some ten minutes on two cores
    python benchmarks/speed/force_balanced.py --dataset digits --steps 60 --rounds 2      a try, without data

Two cases of `recipes/mnist_moe.py`: with its balance loss, and without, where the router favours some experts. Experts
are spread over the processes. Every round runs each case freely and forced, one after the other, each in fresh
processes; a round's fraction is samples per second of the one over the other, each the median of the lines after the
first third. The table has medians over rounds, and the least and the greatest fraction. Writes
benchmarks/results/force_balanced.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from tests.support.helpers import run_recipe
from toolkit.run.tracking.jsonl import read_metrics

CASES = {"balance loss": "full", "no balance": "no_balance"}
"""Presets of the recipe."""


@dataclass(frozen=True)
class Speed:
    """Of one run."""

    samples_per_second: float
    rank_imbalance: float
    """Busiest process over the mean, mean over forwards."""


def speed(lines: Iterable[Mapping[str, Any]], *, after: int) -> Speed:
    """Medians over those of a run's lines of metrics that end later than step `after`."""
    settled = [line for line in lines if line["step"] > after and "perf/samples_per_second" in line]
    names = ("perf/samples_per_second", "moe/rank_imbalance")
    return Speed(*(statistics.median(line[name] for line in settled) for name in names))


def row(case: str, rounds: Sequence[tuple[Speed, Speed]]) -> dict[str, Any]:
    """Of the table, given the free and the forced run of each round."""
    fractions = [free.samples_per_second / forced.samples_per_second for free, forced in rounds]
    free, forced = zip(*rounds, strict=True)
    return {
        "case": case,
        "imbalance": round(statistics.median(run.rank_imbalance for run in free), 3),
        "imbalance, forced": round(statistics.median(run.rank_imbalance for run in forced), 3),
        "samples/s": round(statistics.median(run.samples_per_second for run in free)),
        "samples/s, forced": round(statistics.median(run.samples_per_second for run in forced)),
        "fraction of forced": round(statistics.median(fractions), 3),
        "least to greatest": f"{min(fractions):.3f} to {max(fractions):.3f}",
    }


def train(preset: str, options: argparse.Namespace, *, forced: bool) -> Speed:
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "--run-dir": f"{folder}/run",
            "--num-processes": options.processes,
            "--dataset": options.dataset,
            "--max-steps": options.steps,
            "--log-every": max(1, options.steps // 12),
            "--tracker": "none",
        }
        if options.data_dir:
            flags["--data-dir"] = options.data_dir
        done = run_recipe(
            "mnist_moe",
            preset,
            "--cpu",
            *["--force-balanced"] * forced,
            *(str(part) for flag in flags.items() for part in flag),
            timeout_s=1200,
        )
        if done.returncode:
            raise RuntimeError(f"mnist_moe {preset} ended with code {done.returncode}:\n{done.stderr}")
        return speed(read_metrics(Path(folder) / "run" / "metrics.jsonl"), after=options.steps // 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder with MNIST")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rounds: dict[str, list[tuple[Speed, Speed]]] = {case: [] for case in CASES}
    for _ in range(options.rounds):
        for case, preset in CASES.items():
            rounds[case].append((train(preset, options, forced=False), train(preset, options, forced=True)))
    facts = {"dataset": options.dataset, "processes": options.processes, "steps": options.steps}
    write_report("force_balanced", [row(*each) for each in rounds.items()], rounds=options.rounds, seed=0, **facts)


if __name__ == "__main__":
    main()
