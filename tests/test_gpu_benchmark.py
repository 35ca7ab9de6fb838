"""The benchmarks for GPUs run where there is none, as a rehearsal."""

from __future__ import annotations

import ast
import time
from typing import Any

import psutil
import pytest

from benchmarks.speed import gpu_report, scaling
from recipes import lm_moe
from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT
from toolkit.run import cli


def rehearse(benchmark: str, *options: str) -> list[dict[str, Any]]:
    """Its rows, from a tiny model on the CPU."""
    return rows_of(str(ROOT / "benchmarks" / benchmark), "--rehearse", *options)


def rows_of(*words: str) -> list[dict[str, Any]]:
    """Those that the program prints."""
    done = run_forked(*words)
    assert done.returncode == 0, done.stderr
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def test_the_layers_benchmark_rehearses_on_a_cpu() -> None:
    rows = rehearse("speed/gpu_layer.py", "--rounds", "1")
    names = [row["contender"] for row in rows]
    assert names[:3] == ["ours", "ours, compiled", "grouped products alone"]
    ran = {row["contender"]: row for row in rows if row["failed"] is None}
    assert {"ours", "transformers eager", "transformers grouped_mm"} < set(ran)
    assert all(row["ms"] > 0 and 0 <= row["share"] < 1 for row in ran.values())
    failed = next(row for row in rows if row["contender"] == "transformers sonicmoe")  # which needs a package
    assert "kernels" in failed["failed"]
    assert failed["ms"] is None


MISSED = """
from benchmarks.speed.gpu_layer import GROUPED, OURS, QWEN3, missed_goals

def row(shape, contender, share=0.4, ratio=0.9, failed=None):
    return {"shape": shape, "contender": contender, "share": share, "ours is faster by": ratio, "failed": failed}

print([missed_goals([row(QWEN3, OURS)]), missed_goals([row(QWEN3, OURS, share=0.45), row("other", OURS)]),
    missed_goals([row("other", GROUPED)]), missed_goals([row("other", GROUPED, ratio=1.0), row("other", "eager")]),
    missed_goals([row("other", GROUPED, ratio=None), row("other", OURS, None, None, "no memory")])])
"""


def test_what_the_layer_is_to_reach_is_a_share_at_one_shape_and_the_rivals_speed_at_each():
    (missed,) = rows_of("-c", MISSED)
    assert missed == [
        ["Qwen3-MoE-like: ours has 0.4 of the chip's rate, wanted 0.45"],
        [],
        ["other: ours has 0.9 times the speed of transformers grouped_mm, wanted 1"],
        [],
        ["other: ours failed: no memory"],
    ]


def test_the_fine_tuning_benchmark_rehearses_on_a_cpu() -> None:
    rows = rehearse("speed/gpu_training.py", "--adapters", "--rounds", "1", "--steps", "2", "--warmup", "1")
    assert [row["contender"] for row in rows] == [
        "ours",
        "ours, experts in four bits",
        "ours, experts on the host",
        "transformers Trainer",
        "loop by hand",
    ]
    assert all(row["tokens per second"] > 0 for row in rows)


PARTS = {
    "ends": "print('a row'); 1 / 0",
    "leaves": "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, 'is left')",
    "hangs": """
import time
print("the", "first", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("and what", "it found")
    time.sleep(60)
""",
}


def report(parts: dict[str, str], folder: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The exit code and the page, which has the programs, too, of a report of 3 s at most whose parts they are."""
    monkeypatch.setattr(
        gpu_report, "PARTS", [gpu_report.Part(name, ("-c", code), (), 1.0) for name, code in parts.items()]
    )
    monkeypatch.setattr(gpu_report, "GRACE", 0.5)
    monkeypatch.setattr(gpu_report, "PAGE", folder / "build" / "gpu-report.md")
    monkeypatch.setattr("sys.argv", ["gpu_report.py", "--rehearse", "--minutes", "0.05"])
    return gpu_report.main(), gpu_report.PAGE.read_text()


def test_the_report_of_a_gpu_keeps_what_a_part_had_when_it_failed_or_its_time_was_over(tmp_path, monkeypatch, capsys):
    began = time.monotonic()
    code, page = report(PARTS, tmp_path, monkeypatch)
    assert time.monotonic() - began < 30  # neither what sleeps nor what is left is waited for
    assert code == 1
    assert "ended with exit code 1" in page
    assert "ZeroDivisionError" in page
    assert "ended, because its time was over" in page
    assert "the first" in page
    assert "and what it found" in page
    assert "a row" in capsys.readouterr().out
    left = next(int(line.split()[0]) for line in page.splitlines() if line.endswith(" is left"))
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


def test_the_parts_of_the_report_of_a_gpu_are_commands_of_this_repository() -> None:
    assert all((ROOT / word).exists() for part in gpu_report.PARTS for word in part.words if word.endswith(".py"))
    assert "tests/test_gpu.py" in gpu_report.PARTS[-1].words


TRAINING = """
import sys
from benchmarks.speed import gpu_training

def fails(job):
    raise MemoryError("no room")

gpu_training.CONTENDERS = {"fails": fails} | gpu_training.CONTENDERS
sys.argv[0] = gpu_training.__file__
sys.exit(gpu_training.main())
"""


def test_the_trainings_benchmark_rehearses_on_a_cpu_and_a_contender_that_fails_is_a_row() -> None:
    words = ["--rehearse", "--rounds", "1", "--steps", "2", "--warmup", "1", "--curve", "10"]
    failed, *rows = rows_of("-c", TRAINING, *words)
    assert (failed["contender"], failed["failed"], failed["tokens per second"]) == ("fails", "no room", None)
    assert [row["contender"] for row in rows[:-2]] == [
        "ours", "transformers Trainer", "loop by hand", "transformers Trainer, as it comes"
    ]  # fmt: skip
    assert [row["precision"] for row in rows[-2:]] == ["float32", "bfloat16"]
    assert all(row["tokens per second"] > 0 and row["failed"] is None for row in rows)


# --- several GPUs -----------------------------------------------------------------------------------------------------


def test_several_gpus_rehearse_on_cpu_processes(monkeypatch) -> None:
    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        return run_forked(*command[1:], env=env)

    monkeypatch.setattr(scaling.subprocess, "run", run)
    row = scaling.measure("lm_moe", scaling.REHEARSAL, 2, "--batch-size", 16, *scaling.PLACES["spread over GPUs"])
    assert row["processes"] == 2
    assert row["samples per second"] > 0
    assert 0 < row["exchange, %"] < 100


def test_each_gpu_gets_the_same_tokens_and_a_run_that_fails_is_a_row(monkeypatch) -> None:
    asked = []

    def measure(_: str, main: Any, processes: int, *flags: Any) -> dict[str, Any]:
        words = [*main.flags, *map(str, flags)]
        config = cli.parse(lm_moe.PRESETS, [main.preset, "--num-processes", str(processes), *words])
        asked.append((processes, config.parallel_strategy, config.batch_size // processes))
        assert config.mixed_precision == "bf16"
        if config.parallel_strategy == "data_parallel" and processes == 4:
            raise scaling.Failed("restart: a step ran out of memory\na later line\n")
        return {"samples per second": 30 * processes if processes < 4 else 90, **dict.fromkeys(scaling.OF_A_STEP, 1.0)}

    monkeypatch.setattr(scaling, "measure", measure)
    *_, rows = scaling.measure_gpus(5, rehearse=False)
    data, spread = "data_parallel", "expert_parallel"
    assert asked == [(1, data, 32), (2, data, 32), (2, spread, 32), (4, data, 32), (4, spread, 32)]
    assert [row["efficiency"] for row in rows] == [1.0, 1.0, 1.0, None, 0.75]
    assert [row["failed"] for row in rows] == [None, None, None, "restart: a step ran out of memory", None]


def test_a_machine_with_less_than_two_gpus_is_told_so(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["scaling.py", "--gpus"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit, match="compares one GPU with several, and this machine has 1"):
        scaling.main()
