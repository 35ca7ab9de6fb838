"""The sbatch templates on a real Slurm of two nodes in this machine: `make test-slurm`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands.sweep.toy import RECIPE
from tests.support.helpers import ROOT

pytestmark = pytest.mark.slurm


def wait_for(condition: Callable[[], object], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} took more than {seconds} s"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Calls a Slurm command and returns what it says."""
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
    """A folder to submit from, so that runs do not land in this checkout."""
    for name in ("slurm", "recipes", "toolkit"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "toy.py").write_text(RECIPE)
    return tmp_path


def submit(slurm: Callable[..., str], checkout: Path, *words: str) -> str:
    return slurm("sbatch", "--parsable", "--mem=1G", "--cpus-per-task=1", *words, cwd=checkout).strip()


def log_of(checkout: Path, job: str) -> str:
    return "".join(path.read_text() for path in checkout.glob(f"logs/*-{job}*.log"))


DEBUG = ("recipes/mnist_moe.py", "debug", "--tracker", "none")


def test_a_run_of_two_processes_ends_with_results(slurm, checkout):
    job = submit(slurm, checkout, "slurm/multi_gpu.sbatch", *DEBUG)
    wait_for(lambda: not slurm("squeue", "-h", "-j", job).strip(), "the run")
    results = checkout / "runs" / f"slurm-{job}" / "results.json"
    assert results.exists(), log_of(checkout, job)
    assert json.loads(results.read_text())["world_size"] == 2


@pytest.mark.parametrize(
    ("template", "world_size"),
    [
        (("slurm/run.sbatch", *DEBUG, "--cpu"), 1),
        (("--nodes=2", "slurm/multi_node.sbatch", *DEBUG), 2),
    ],
    ids=["one node", "two nodes"],
)
def test_a_run_that_is_warned_saves_is_queued_anew_and_ends(template, world_size, slurm, checkout):
    job = submit(slurm, checkout, *template, "--epochs", "15")
    wait_for(lambda: re.search(r"^step ", log_of(checkout, job), re.MULTILINE), "the first steps")
    slurm("scancel", "--signal=USR1", "--batch", job)
    wait_for(lambda: "saved: requeued" in log_of(checkout, job), "saving")
    wait_for(lambda: "continuing at step" in log_of(checkout, job), "the start of the continued run")
    wait_for(lambda: not slurm("squeue", "-h", "-j", job).strip(), "the continued run")
    results = checkout / "runs" / f"slurm-{job}" / "results.json"
    assert results.exists(), log_of(checkout, job)
    assert json.loads(results.read_text())["world_size"] == world_size


def test_an_array_takes_a_seed_per_task(slurm, checkout):
    job = submit(
        slurm, checkout, "--array=0-2", "slurm/sweep_array.sbatch", "--grid", "labels=100,600", "toy.py", "full"
    )
    wait_for(lambda: not slurm("squeue", "-h", "-j", job).strip(), "the array")
    starts = (checkout / "runs" / "sweep" / "cells" / "starts.txt").read_text().splitlines()
    assert sorted(starts) == sorted(f"{labels} 0.0 {seed}" for labels in (100, 600) for seed in range(3)), log_of(
        checkout, job
    )
