"""Out-of-memory steps are repeated with smaller micro-batches."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.support.forked_python import run_forked
from tests.support.trainers import learned
from tests.train import memory_recipe
from toolkit.errors import EXIT_PREEMPTED, StepOutOfMemory, UserError, is_out_of_memory
from toolkit.run.launch import exits
from toolkit.run.micro_batches import MICRO_BATCH_SIZE
from toolkit.run.run import Run
from toolkit.train.callbacks.batch_size import SmallerMicroBatches, _shrink, _shrunk

LINE = "restart: step 1 ran out of memory with micro-batches of {} sample(s) on each process: "


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_forked(memory_recipe.__file__, "--run-dir", str(folder), *flags, timeout_s=120)


@pytest.mark.parametrize("processes", [1, 2])
def test_restart_after_out_of_memory_equals_a_run_with_smaller_micro_batches(tmp_path, processes):
    done = run(tmp_path / "run", "--num-processes", str(processes), "--fits", str(32 // processes))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "memory" in line] == [
        LINE.format(64 // processes) + f"the run continues from its newest checkpoint with {32 // processes}."
    ]
    assert "Traceback" not in done.stderr
    halved = memory_recipe.full().replace(run_dir=tmp_path / "halved", gradient_accumulation_steps=2)
    run_distributed(memory_recipe.main, processes, halved)
    assert learned(tmp_path / "run") == learned(tmp_path / "halved")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["micro_batch_size"], results["out_of_memory_with"]) == (32 // processes, 64 // processes)
    assert len(results["restarts"]) == 1
    assert "because a step ran out of memory" in (tmp_path / "run" / "summary.txt").read_text()


def trainer_of(folder: Path, *, rank: int = 0, world_size: int = 2, accumulation: int = 1, phase: str = "step"):
    of_rank = {"rank": rank, "world_size": world_size, "is_main": rank == 0}
    run = SimpleNamespace(config=memory_recipe.full(), folder=folder, **of_rank)
    batches = SimpleNamespace(accumulation=accumulation)
    return SimpleNamespace(run=run, phase=phase, batches=batches, state=SimpleNamespace(step=6))


def test_on_exception_restarts_only_steps_with_divisible_micro_batches(tmp_path):
    callback = SmallerMicroBatches()
    callback.on_exception(trainer_of(tmp_path, phase="evaluation"), MemoryError())
    callback.on_exception(trainer_of(tmp_path), RuntimeError("a bug"))
    callback.on_exception(trainer_of(tmp_path, accumulation=32), MemoryError())
    assert not list(tmp_path.iterdir())
    with pytest.raises(StepOutOfMemory, match=r"step 7 ran out of memory with micro-batches of 32 .* with 16"):
        callback.on_exception(trainer_of(tmp_path, rank=1), MemoryError())
    # The other ranks lose the connection to rank 1.
    with pytest.raises(StepOutOfMemory, match="with 16"):
        callback.on_exception(trainer_of(tmp_path), RuntimeError("Connection closed by peer"))
    callback.on_exception(trainer_of(tmp_path), UserError("bad input"))
    callback.on_exception(trainer_of(tmp_path, accumulation=2), RuntimeError("a bug"))
    callback.on_exception(trainer_of(tmp_path, world_size=4), RuntimeError("a bug"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: ncclUnhandledCudaError. Last error: Failed to CUDA calloc 4194304 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_is_out_of_memory_recognizes_the_errors_of_libraries(error, expected):
    assert is_out_of_memory(error) is expected


def test_start_again_under_a_launcher_exits_with_the_preempted_code(monkeypatch, tmp_path):
    lines: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(exits, "report", lambda line, label: lines.append(label + line))
    monkeypatch.setattr(exits, "leave", sys.exit)
    with pytest.raises(SystemExit, match=str(EXIT_PREEMPTED)):
        exits.start_again(StepOutOfMemory("step 1 ran out of memory.", tmp_path))
    assert lines == ["step 1 ran out of memory. Run the same command again."]


def started(folder: Path) -> Run:
    return tk.start_run("small", tk.RunConfig(run_dir=folder, tracker="none", cpu=True, batch_size=24))


def test_run_continues_with_the_next_smaller_divisor_of_the_batch_size(tmp_path):
    with started(tmp_path) as run:
        assert run.accumulation == 1
        assert [_shrink(run, pieces) for pieces in (1, 3, 8, 24)] == [12, 4, 1, None]
        assert _shrink(run, 3) == 4
        assert _shrunk(run, 3) == 4
        assert _shrunk(run, 6) is None
    with started(tmp_path) as run:
        assert run.accumulation == 6
    saved = json.loads((tmp_path / MICRO_BATCH_SIZE).read_text())
    assert saved == {"world_size": 1, "micro_batch_size": 4, "out_of_memory_with": 8}


def test_run_with_another_world_size_starts_with_the_configured_size(tmp_path):
    with started(tmp_path) as run:
        _shrink(run, 1)
    (tmp_path / MICRO_BATCH_SIZE).write_text('{"world_size": 2, "micro_batch_size": 6, "out_of_memory_with": 12}')
    with started(tmp_path) as run:
        assert run.accumulation == 1


@pytest.mark.parametrize("content", ["", "\xff{", "[]", "{}", '{"world_size": 1, "micro_batch_size": 6}'])
def test_damaged_micro_batch_size_raises(tmp_path, content):
    started(tmp_path).close()
    (tmp_path / MICRO_BATCH_SIZE).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=f"{MICRO_BATCH_SIZE}: cannot be read"):
        started(tmp_path)


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "out_of_memory_with"),
    [(None, 6, 12), (1, "six", 12), (1, True, 12), (1, 0, 12), (1, -6, 12), (1, 48, 12), (1, 5, 12), (1, 6, [12])],
)
def test_invalid_micro_batch_size_raises(tmp_path, world_size, micro_batch_size, out_of_memory_with):
    values = {"world_size": world_size, "micro_batch_size": micro_batch_size, "out_of_memory_with": out_of_memory_with}
    test_damaged_micro_batch_size_raises(tmp_path, json.dumps(values))
