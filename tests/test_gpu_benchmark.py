"""The benchmarks for GPUs run where there is none, as a rehearsal."""

from __future__ import annotations

import ast
from typing import Any

from benchmarks.speed import gpu_report
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
    assert all(row["ms"] > 0 and 0 <= row["share"] < 1 for row in rows)


def test_the_fine_tuning_benchmark_rehearses_on_a_cpu() -> None:
    rows = rehearse("speed/gpu_training.py", "--adapters", "--rounds", "1", "--steps", "2", "--warmup", "1")
    assert [row["contender"] for row in rows] == [
        "ours", "ours, experts in four bits", "transformers Trainer", "loop by hand"
    ]  # fmt: skip
    assert all(row["tokens per second"] > 0 for row in rows)


PARTS = {"ends": "print('a row'); 1 / 0", "hangs": "import time; print('the first', flush=True); time.sleep(60)"}


def test_the_report_of_a_gpu_keeps_what_a_part_had_when_it_failed_or_its_time_was_over(tmp_path, monkeypatch, capsys):
    parts = [gpu_report.Part(name, ("-c", code), (), 1.0) for name, code in PARTS.items()]
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    monkeypatch.setattr(gpu_report, "PAGE", tmp_path / "build" / "gpu-report.md")
    monkeypatch.setattr("sys.argv", ["gpu_report.py", "--rehearse", "--minutes", "0.05"])
    assert gpu_report.main() == 1
    page = gpu_report.PAGE.read_text()
    assert "failed with exit code 1" in page
    assert "ZeroDivisionError" in page
    assert "ended, because its time was over" in page
    assert "the first" in page
    assert "a row" in capsys.readouterr().out


def test_the_parts_of_the_report_of_a_gpu_are_commands_of_this_repository() -> None:
    assert all((ROOT / word).exists() for part in gpu_report.PARTS for word in part.words if word.endswith(".py"))
    assert "tests/test_gpu.py" in gpu_report.PARTS[-1].words


def test_the_trainings_benchmark_rehearses_on_a_cpu() -> None:
    rows = rehearse("speed/gpu_training.py", "--rounds", "1", "--steps", "2", "--warmup", "1", "--curve", "10")
    assert [row["contender"] for row in rows[:3]] == ["ours", "transformers Trainer", "loop by hand"]
    assert [row["precision"] for row in rows[3:]] == ["float32", "bfloat16"]
    assert all(row["tokens per second"] > 0 for row in rows)
