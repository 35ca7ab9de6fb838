"""The benchmark for GPUs runs where there is none, as a rehearsal."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

from tests.helpers import ROOT


def test_the_gpu_benchmark_rehearses_on_a_cpu() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_layer.py"), "--rehearse", "--rounds", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert [row["contender"] for row in rows] == ["ours", "grouped products alone", "transformers grouped_mm"]
    assert all(row["ms"] > 0 and row["share"] > 0 for row in rows)
