"""Each benchmark starts: its arguments are parsed, and those that take seconds run their smallest case."""

from __future__ import annotations

import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT

ALONE = {"report.py"}
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.name not in ALONE and "parse_args()" in path.read_text() and path.parent.name != "matrix"
)
SMALLEST = {
    "learning/lmu_psmnist.py": "--work runs --report",
    "placement/planners.py": "",
    "speed/gpu_layer.py": "--rehearse --rounds 1",
    "speed/trainer_overhead.py": "--rounds 1 --steps 2 --warmup 1 --threads 1 --samples 128",
}

PROGRAM = """
import runpy, sys
sys.path[:] = [path for path in sys.path if not path.startswith({root!r}) or "site-packages" in path]
sys.argv = {words!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A script in a process whose path is not that of pytest, which has recipes/."""


def run_script(script: Path, *words: str) -> CompletedProcess[str]:
    return run_forked("-c", PROGRAM.format(root=str(ROOT), words=[str(script), *words]), cwd=script.parent)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_benchmark_arguments_are_parsed(script: Path):
    done = run_script(ROOT / script, "--help")
    assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr


@pytest.mark.parametrize("name", SMALLEST)
def test_benchmark_smallest_case_runs(name: str, tmp_path: Path):
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")  # a record is written next to the scripts
    for package in ("toolkit", "recipes"):
        (tmp_path / package).symlink_to(ROOT / package)
    done = run_script(tmp_path / "benchmarks" / name, *SMALLEST[name].split())
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1), done.stderr  # 1: a target is missed
    assert done.stdout
