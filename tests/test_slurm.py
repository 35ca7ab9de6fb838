"""sbatch templates on a Slurm cluster of two nodes on this machine: `make test-slurm`."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.processes import ROOT
from tests.commands.sweep.toy import RECIPE

pytestmark = pytest.mark.slurm


def wait_for(condition: Callable[[], object], event: str) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, f"no {event} within 240 s"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Function that runs a Slurm command and returns its output."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("needs root and Slurm: apt-get install --no-install-recommends slurm-wlm")
    folder = tmp_path_factory.mktemp("slurm")
    script = str(ROOT / "slurm" / "local_cluster.sh")
    subprocess.run([script, "start", str(folder)], stdout=subprocess.DEVNULL, check=True)
    environment = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CPUS_ONLY": "2",
    }

    def call(*words: str, cwd: Path = ROOT) -> str:
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    try:
        yield call
    finally:
        subprocess.run([script, "stop", str(folder)], check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Folder to submit from, which gets the runs."""
    for name in ("slurm", "recipes", "toolkit"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "toy.py").write_text(RECIPE)
    return tmp_path


def submit(slurm: Callable[..., str], checkout: Path, *words: str) -> str:
    return slurm("sbatch", "--parsable", "--mem=1G", "--cpus-per-task=1", *words, cwd=checkout).strip()


def log_of(checkout: Path, job: str) -> str:
    return "".join(path.read_text() for path in checkout.glob(f"logs/*-{job}*.log"))


def results_of(slurm: Callable[..., str], checkout: Path, job: str) -> dict[str, Any]:
    """Wait for the end of `job` and return its results."""
    wait_for(lambda: not slurm("squeue", "-h", "-j", job).strip(), "end of the job")
    results = checkout / "runs" / f"slurm-{job}" / "results.json"
    assert results.exists(), log_of(checkout, job)
    return json.loads(results.read_text())


DEBUG = ("recipes/mnist_moe.py", "debug", "--tracker", "none")


def test_multi_gpu_run_has_results_of_two_processes(slurm, checkout):
    job = submit(slurm, checkout, "slurm/multi_gpu.sbatch", *DEBUG)
    assert results_of(slurm, checkout, job)["world_size"] == 2


@pytest.mark.parametrize(
    ("template", "world_size"),
    [(("slurm/run.sbatch", *DEBUG, "--cpu"), 1), (("--nodes=2", "slurm/multi_node.sbatch", *DEBUG), 2)],
    ids=["one node", "two nodes"],
)
def test_signalled_run_saves_is_requeued_and_finishes(template, world_size, slurm, checkout):
    job = submit(slurm, checkout, *template, "--epochs", "15")
    wait_for(lambda: re.search(r"^step ", log_of(checkout, job), re.MULTILINE), "step")
    slurm("scancel", "--signal=USR1", "--batch", job)
    wait_for(lambda: "saved: requeued" in log_of(checkout, job), "save")
    wait_for(lambda: "continuing at step" in log_of(checkout, job), "resume")
    assert results_of(slurm, checkout, job)["world_size"] == world_size


def test_array_runs_each_cell_with_each_seed(slurm, checkout):
    grid = ("--grid", "labels=100,600", "toy.py", "full")
    job = submit(slurm, checkout, "--array=0-2", "slurm/sweep_array.sbatch", *grid)
    wait_for(lambda: not slurm("squeue", "-h", "-j", job).strip(), "end of the array")
    starts = (checkout / "runs" / "sweep" / "cells" / "starts.txt").read_text().splitlines()
    expected = [f"{labels} 0.0 {seed}" for labels in (100, 600) for seed in range(3)]
    assert sorted(starts) == sorted(expected), log_of(checkout, job)
