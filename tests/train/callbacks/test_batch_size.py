"""A step that runs out of memory is repeated with smaller micro-batches, and the result is that of the smaller ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import toolkit as tk
from tests.support.forked_python import run_forked
from tests.support.helpers import run_distributed
from tests.train import memory_recipe
from toolkit.errors import EXIT_PREEMPTED, StepOutOfMemory, UserError, is_out_of_memory
from toolkit.run.launch import exits
from toolkit.run.micro_batches import MICRO_BATCH_SIZE
from toolkit.run.run import Run
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks.batch_size import SmallerMicroBatches, _shrink, _shrunk

LINE = "restart: step 1 ran out of memory with micro-batches of {} sample(s) on each process: "


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_forked(memory_recipe.__file__, "--run-dir", str(folder), *flags, timeout_s=120)


def learned(folder: Path) -> tuple[list[dict], bytes]:
    """Metrics without what the clock says and what was said of restarts, and the last checkpoint's tensors."""
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "run/restarts" not in line]
    lines = [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return lines, b"".join(path.read_bytes() for path in sorted(newest.glob("*.safetensors")))


@pytest.mark.parametrize(
    ("processes", "limit"),
    # Micro-batches of 64 map 8 GiB and those of 32 map 4, of which nothing is touched; threads map what they like.
    [(1, ("--limit-mib", "6144")), (2, ("--num-processes", "2", "--rank-1-fits", "16"))],
    ids=["under a limit of the process", "on one of two processes"],
)
def test_the_result_is_that_of_the_smaller_micro_batches(tmp_path: Path, processes: int, limit: tuple[str, ...]):
    done = run(tmp_path / "run", *limit)
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
    run = SimpleNamespace(
        config=memory_recipe.full(), folder=folder, rank=rank, world_size=world_size, is_main=rank == 0
    )
    batches = SimpleNamespace(accumulation=accumulation)
    return SimpleNamespace(run=run, phase=phase, batches=batches, state=SimpleNamespace(step=6))


def test_only_a_step_that_micro_batches_can_shorten_is_repeated(tmp_path: Path):
    callback = SmallerMicroBatches()
    callback.on_exception(trainer_of(tmp_path, phase="evaluation"), MemoryError())
    callback.on_exception(trainer_of(tmp_path), RuntimeError("a bug"))
    callback.on_exception(trainer_of(tmp_path, accumulation=32), MemoryError())
    assert not list(tmp_path.iterdir())
    with pytest.raises(StepOutOfMemory, match=r"step 7 ran out of memory with micro-batches of 32 .* with 16"):
        callback.on_exception(trainer_of(tmp_path, rank=1), MemoryError())
    # The others notice that rank 1 is gone.
    with pytest.raises(StepOutOfMemory, match="with 16"):
        callback.on_exception(trainer_of(tmp_path), RuntimeError("Connection closed by peer"))
    callback.on_exception(trainer_of(tmp_path), UserError("bad input"))
    callback.on_exception(trainer_of(tmp_path, accumulation=2), RuntimeError("a bug"))
    callback.on_exception(trainer_of(tmp_path, world_size=4), RuntimeError("a bug"))


@pytest.mark.parametrize(
    ("error", "is_it"),
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
def test_where_there_is_no_memory_is_told_by_what_libraries_say(error: Exception, is_it: bool):
    assert is_out_of_memory(error) == is_it


def test_under_a_launcher_the_same_command_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told: list[object] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(exits, "report", lambda line, label: told.append(label + line))

    def leave(code: int) -> None:
        told.append(code)
        raise SystemExit

    monkeypatch.setattr(exits, "leave", leave)
    with pytest.raises(SystemExit):
        exits.start_again(StepOutOfMemory("step 1 ran out of memory.", tmp_path))
    assert told == ["step 1 ran out of memory. Run the same command again.", EXIT_PREEMPTED]


def started(folder: Path) -> Run:
    return tk.start_run("small", tk.RunConfig(run_dir=folder, tracker="none", cpu=True, batch_size=24))


def test_a_run_that_ran_out_of_memory_continues_with_the_next_smaller_size_that_divides(tmp_path: Path):
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


def test_a_run_on_another_number_of_processes_begins_with_the_size_of_its_config(tmp_path: Path):
    with started(tmp_path) as run:
        _shrink(run, 1)
    (tmp_path / MICRO_BATCH_SIZE).write_text('{"world_size": 2, "micro_batch_size": 6, "out_of_memory_with": 12}')
    with started(tmp_path) as run:
        assert run.accumulation == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff{",
        b"[]",
        b"{}",
        b'{"world_size": 1, "micro_batch_size": 6}',
        b'{"world_size": null, "micro_batch_size": 6, "out_of_memory_with": 12}',
        b'{"world_size": 1, "micro_batch_size": "six", "out_of_memory_with": 12}',
        b'{"world_size": 1, "micro_batch_size": true, "out_of_memory_with": 12}',
        b'{"world_size": 1, "micro_batch_size": 0, "out_of_memory_with": 12}',
        b'{"world_size": 1, "micro_batch_size": -6, "out_of_memory_with": 12}',
        b'{"world_size": 1, "micro_batch_size": 48, "out_of_memory_with": 12}',
        b'{"world_size": 1, "micro_batch_size": 5, "out_of_memory_with": 12}',
        b'{"world_size": 1, "micro_batch_size": 6, "out_of_memory_with": [12]}',
    ],
)
def test_damaged_micro_batch_size_raises_with_its_name(tmp_path: Path, content: bytes):
    started(tmp_path).close()
    (tmp_path / MICRO_BATCH_SIZE).write_bytes(content)
    with pytest.raises(UserError, match=f"{MICRO_BATCH_SIZE}: cannot be read"):
        started(tmp_path)
