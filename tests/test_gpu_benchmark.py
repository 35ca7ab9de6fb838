"""The benchmarks for GPUs run where there is none, as a rehearsal."""

from __future__ import annotations

import ast
from typing import Any

from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT


def rehearse(benchmark: str, *options: str) -> list[dict[str, Any]]:
    """Its rows, from a tiny model on the CPU."""
    done = run_forked(str(ROOT / "benchmarks" / benchmark), "--rehearse", *options)
    assert done.returncode == 0, done.stderr
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def test_the_layers_benchmark_rehearses_on_a_cpu() -> None:
    rows = rehearse("speed/gpu_layer.py", "--rounds", "1")
    names = [row["contender"] for row in rows]
    assert names[:3] == ["ours", "ours, compiled", "grouped products alone"]
    assert {"transformers eager", "transformers grouped_mm"} < set(names)
    assert all(row["ms"] > 0 and row["share"] > 0 for row in rows)


def test_the_trainings_benchmark_rehearses_on_a_cpu() -> None:
    rows = rehearse("speed/gpu_training.py", "--rounds", "1", "--steps", "2", "--warmup", "1", "--curve", "10")
    assert [row["contender"] for row in rows[:3]] == ["ours", "transformers Trainer", "loop by hand"]
    assert [row["precision"] for row in rows[3:]] == ["float32", "bfloat16"]
    assert all(row["tokens per second"] > 0 for row in rows)
