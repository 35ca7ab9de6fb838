"""Kills processes and takes machines away from a run on Ray, adds machines to it, and compares it with the run that
nothing happened to.

    python benchmarks/faults/ray_faults.py                   ten faults, 2 to 4 processes, some minutes on two cores
    python benchmarks/faults/ray_faults.py --faults 3        fewer

The cluster is on this machine: a node of Ray for each process. The recipe is `mnist_moe debug`, in float64, because in
float32 worlds of other sizes round differently and AdamW makes whole steps of it. The global batch is 64 in every
world; with three processes a rank has 21 or 22 samples of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.run.tracking.jsonl import read_metrics

RECIPE = """
import json, os, sys, time
sys.path.insert(0, {root!r})
from recipes import mnist_moe
from tests.support.equality import in_float64
from toolkit.train.trainer import Trainer

PRESETS = {{"debug": mnist_moe.debug}}
step = Trainer.train_step

def slowly(self, micro_batches):
    beat = {{"rank": self.run.rank, "process": os.getpid(), "step": self.state.step}}
    (self.run.folder / f".rank-{{self.run.rank}}.json").write_text(json.dumps(beat))
    time.sleep({pause})
    step(self, micro_batches)

def main(config):
    Trainer.train_step = slowly
    with in_float64():
        return mnist_moe.main(config)
"""
FEWEST, MOST = 2, 4
TIME_LIMIT_S = 300
"""For the run to go on after a fault."""
TOLERANCE = 1e-6
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
QUICK_DEATHS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 2000,
    "health_check_failure_threshold": 6,
}
"""Ray takes a machine for gone after 12 seconds instead of half a minute; less is too little on a busy one."""


class Machines:
    """A Ray cluster on this machine whose nodes, of one CPU each, come and go."""

    def __init__(self, count: int):
        os.environ.update(ENVIRONMENT)
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_DEATHS},
        )
        self.nodes: list[Any] = []
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1, wait=False))

    def remove(self, place: int) -> None:
        self.cluster.remove_node(self.nodes.pop(place), allow_graceful=False)


@contextmanager
def machines(count: int) -> Iterator[Machines]:
    found = Machines(count)
    try:
        yield found
    finally:
        found.cluster.shutdown()


class DisturbedRun:
    """`toolkit ray` as a process of its own, and what its folder says of it."""

    def __init__(self, script: Path, folder: Path, flags: Sequence[str], workers: str, address: str):
        self.folder = folder
        self.log = folder.with_suffix(".log")
        words = ["ray", str(script), "debug", "--workers", workers, "--resize-every", "1", "--max-restarts", "50"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "toolkit", *words, *flags, "--run-dir", str(folder)],
                env=os.environ | ENVIRONMENT | {"RAY_ADDRESS": address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + TIME_LIMIT_S
        while not condition():
            if time.monotonic() > deadline or self.process.poll() not in (None, 0):
                raise SystemExit(f"error: {what} did not happen:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def ranks(self) -> dict[int, dict[str, Any]]:
        """What each rank that trains now wrote last, by its number."""
        found = {}
        for path in self.folder.glob(".rank-*.json"):
            try:
                beat = json.loads(path.read_text())
                os.kill(beat["process"], 0)
            except (OSError, ValueError):
                continue
            found[beat["rank"]] = beat
        return found

    def step(self) -> int:
        """The step that the slowest rank has done."""
        return min((beat["step"] for beat in self.ranks().values()), default=0)

    def starts(self) -> int:
        lines = read_metrics(self.folder / "metrics.jsonl")
        return max((line["run/restarts"] for line in lines if "run/restarts" in line), default=0)

    def trains_again(self, starts: int, world: int | None, steps: int) -> None:
        """Wait until a start after the first `starts` trains, with `world` ranks, for `steps` steps."""
        self.wait_for(lambda: self.starts() > starts or self.process.poll() == 0, "another start")
        self.wait_for(lambda: world is None or len(self.ranks()) == world, f"training with {world} ranks")
        begun = self.step()
        self.wait_for(lambda: self.step() >= begun + steps or self.process.poll() == 0, f"{steps} more steps")


def disturb(run: DisturbedRun, cluster: Machines, kind: str, draws: random.Random) -> None:
    """One fault; the run trains again when this returns."""
    starts = run.starts()
    if kind == "kill":
        rank = draws.choice(sorted(run.ranks()))
        os.kill(run.ranks()[rank]["process"], signal.SIGKILL)
    elif kind == "remove":
        cluster.remove(draws.randrange(len(cluster.nodes)))
    else:
        cluster.add()
    run.trains_again(starts, len(cluster.nodes), draws.randrange(1, 8))


def kinds(count: int, draws: random.Random, nodes: int) -> list[str]:
    """`count` faults that keep the nodes between the fewest and the most, each kind in turn as far as that allows."""
    chosen: list[str] = []
    for _ in range(count):
        possible = ["kill"] + ["remove"] * (nodes > FEWEST) + ["add"] * (nodes < MOST)
        kind = draws.choice([kind for kind in possible if kind not in chosen[-1:]])
        nodes += {"kill": 0, "remove": -1, "add": 1}[kind]
        chosen.append(kind)
    return chosen


def undisturbed(script: Path, folder: Path, flags: Sequence[str]) -> None:
    """The same run, in one process without Ray."""
    code = "import runpy, sys; from toolkit.run.cli import run_recipe; found = runpy.run_path(sys.argv[0]); "
    code += "run_recipe(found['main'], found['PRESETS'])"
    words = ["debug", *flags, "--cpu", "--run-dir", str(folder)]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = sys.argv[1:]; {code}", str(script), *words],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        check=True,
    )


def differences(reference: Path, folder: Path) -> dict[str, Any]:
    """How far the losses and the accuracy of two finished runs are apart."""

    def losses(path: Path) -> dict[tuple[int, str], float]:
        lines = read_metrics(path / "metrics.jsonl")
        return {
            (line["step"], name): line[name] for line in lines for name in ("train/loss", "eval/loss") if name in line
        }

    expected, found = losses(reference), losses(folder)
    results = [json.loads((path / "results.json").read_text()) for path in (reference, folder)]
    return {
        "lines": len(expected),
        "lines missing": len(expected.keys() - found.keys()),
        "largest difference of losses": max(abs(found[key] - expected[key]) for key in expected.keys() & found.keys()),
        "accuracy": results[1]["test_accuracy"],
        "accuracy undisturbed": results[0]["test_accuracy"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    draws = random.Random(args.seed)
    chosen = kinds(args.faults, draws, 3)
    # Some 20 steps pass between two faults, of which the checkpoints give back four at most.
    flags = [
        "--epochs",
        str(4 + 2 * args.faults),
        "--log-every",
        "1",
        "--checkpoint.every-steps",
        "4",
        "--tracker",
        "none",
    ]
    flags += ["--dataset", "digits"]
    parent = Path(tempfile.mkdtemp())
    script = parent / "recipe.py"
    rows = []
    try:
        script.write_text(RECIPE.format(root=str(ROOT), pause=0))
        undisturbed(script, parent / "undisturbed", flags)
        script.write_text(RECIPE.format(root=str(ROOT), pause=0.15))
        with machines(3) as cluster:
            run = DisturbedRun(script, parent / "run", flags, f"{FEWEST}:{MOST}", cluster.address)
            run.trains_again(-1, 3, 5)
            for number, kind in enumerate(chosen, start=1):
                step, began, before = run.step(), time.monotonic(), len(cluster.nodes)
                disturb(run, cluster, kind, draws)
                rows.append(
                    {
                        "fault": number,
                        "kind": kind,
                        "at step": step,
                        "processes before": before,
                        "after": len(cluster.nodes),
                        "seconds until it trains": round(time.monotonic() - began, 1),
                    }
                )
                print(rows[-1], flush=True)
            run.wait_for(lambda: run.process.poll() is not None, "the end")
            if run.process.returncode:
                raise SystemExit(f"error: it ended with {run.process.returncode}:\n{run.log.read_text()[-3000:]}")
        facts = differences(parent / "undisturbed", parent / "run")
        write_report("ray_faults", rows, **facts)
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    print(facts)
    is_equal = facts["accuracy"] == facts["accuracy undisturbed"] and not facts["lines missing"]
    return 0 if is_equal and facts["largest difference of losses"] <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
