"""Throughput of the MNIST recipe, including data, metrics, progress, evaluation and checkpoints.

    python benchmarks/speed/mnist_throughput.py --data-dir DIR

Runs `recipes/mnist_moe.py` for two epochs on one and on two threads, each in a new process, and profiles 400 steps on
one thread. Samples per CPU-second count the CPU time of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

EPOCHS = 2


def child(preset: str, data_dir: str, folder: str, profile: bool) -> None:
    """Run the recipe in this process, and print the results as JSON on the last line."""
    import torch

    from recipes import mnist_moe
    from toolkit.train.trainer import Trainer

    config = mnist_moe.PRESETS[preset]().replace(
        epochs=EPOCHS,
        dataset="mnist",
        data_dir=Path(data_dir) if data_dir else None,
        tracker="none",
        run_dir=Path(folder),
    )
    spent: dict[str, Any] = {}
    fit = Trainer.fit

    def timed_fit(trainer: Trainer) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        result = fit(trainer)
        spent.update(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, samples=trainer.state.samples)
        return result

    Trainer.fit = timed_fit  # type: ignore[method-assign, assignment]
    if profile:
        config = config.replace(max_steps=400)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            mnist_moe.main(config)
        events = profiler.key_averages()
        total = sum(event.self_cpu_time_total for event in events)
        top = sorted(events, key=lambda event: -event.self_cpu_time_total)[:12]
        print(json.dumps([[e.key, round(100 * e.self_cpu_time_total / total, 1), e.count] for e in top]))
        return
    mnist_moe.main(config)
    spent["threads"] = torch.get_num_threads()
    print(json.dumps(spent))


def run(preset: str, threads: int, data_dir: str, profile: bool = False) -> Any:
    """Run `child` in a new process with `threads` threads."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", preset, "--data-dir", data_dir, "--folder", f"{folder}/run"]
        done = subprocess.run(
            command + ["--profile"] * profile,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="", help="folder with MNIST. Default: $TOOLKIT_DATA_DIR or the Hub")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.data_dir, args.folder, args.profile)
        sys.exit()

    from statistics import median

    from benchmarks.report import write_report

    rows = []
    for preset, threads in (("full", 1), ("full", 2), ("dense", 1), ("dense", 2)):
        rounds = [run(preset, threads, args.data_dir) for _ in range(args.rounds)]
        rows.append(
            {
                "preset": preset,
                "threads": threads,
                "samples per CPU-second": round(median(r["samples"] / r["cpu"] for r in rounds)),
                "samples per second": round(median(r["samples"] / r["wall"] for r in rounds)),
                "each round, per second": [round(r["samples"] / r["wall"]) for r in rounds],
            }
        )
    profile = run("full", 1, args.data_dir, profile=True)
    write_report("mnist_throughput", rows, epochs=EPOCHS, profile=profile)
    print("\n| operation | share of CPU time % | calls in 400 steps |\n|---|---|---|")
    for operation, share, calls in profile:
        print(f"| `{operation}` | {share} | {calls} |")
