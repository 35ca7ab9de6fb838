"""Arguments of the benchmark scripts, and the smallest case of scripts that take seconds."""

from __future__ import annotations

import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks.support.processes import ROOT
from tests.support.forked_python import run_forked

SCRIPTS = sorted(
    path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py") if "parse_args()" in path.read_text()
)
SMALLEST = {
    "learning/lmu_psmnist.py": "--work runs --report",
    "placement/planners.py": "",
    "speed/ep_traffic.py": "--plan",
    "speed/gpu_layer.py": "--rehearse --rounds 1",
    "speed/trainer_overhead.py": "--rounds 1 --steps 2 --warmup 1 --threads 1 --samples 128",
}

PROGRAM = """
import runpy, sys
sys.path[:] = [path for path in sys.path if not path.startswith({root!r}) or "site-packages" in path]
for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
    del sys.modules[name]
sys.argv = {words!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script as in a new process: without the path of pytest and preloaded benchmarks."""


def run_script(script: Path, *words: str) -> CompletedProcess[str]:
    return run_forked("-c", PROGRAM.format(root=str(ROOT), words=[str(script), *words]), cwd=script.parent)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_benchmark_arguments_are_parsed(script: Path):
    done = run_script(ROOT / script, "--help")
    assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr


@pytest.mark.parametrize("name", SMALLEST)
def test_benchmark_smallest_case_runs(name: str, tmp_path: Path):
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")  # results are written next to the scripts
    for package in ("toolkit", "recipes"):
        (tmp_path / package).symlink_to(ROOT / package)
    done = run_script(tmp_path / "benchmarks" / name, *SMALLEST[name].split())
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1), done.stderr  # 1: a target is missed
    assert done.stdout
