"""Search for the largest batch that fits in memory, by trial runs of the same command (`--auto-batch-size`)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from toolkit.run.config.run import RunConfig
from toolkit.run.hardware import memory_limit_bytes
from toolkit.run.micro_batches import MICRO_BATCH_SIZE
from toolkit.run.tracking.jsonl import read_metrics

OFF = "--no-auto-batch-size"
TRIAL = (OFF, "--log-every", "1", "--tracker", "none", "--storage", "none", "--max-restarts", "0")
STEPS = 2
"""Steps per trial: the first allocates optimizer states, the second has them next to its activations."""
POLL_S = 0.05


def start_with_largest_batch(config: RunConfig) -> NoReturn:
    """Find the largest batch size, and replace this process by the same command with this batch size.

    Trials are runs of this command in a temporary folder. The batch doubles until a trial fails within two steps or
    might exceed host memory. A continued run keeps its batch size. The learning rate scales with the square root of the
    batch size, the rule for Adam (Malladi et al. 2022, arXiv 2205.10287), or with `scale_lr`.
    """
    recorded = None if config.run_dir is None else _recorded(config.run_dir)
    if recorded is None:
        size, why = _largest(config)
        rate = config.lr if config.scale_lr is not None else config.lr * math.sqrt(size / config.batch_size)
        rule = "times the square root of that" if config.scale_lr is None else "scaled by --scale-lr"
        raised = f"{size / config.batch_size:g} times --batch-size; the learning rate is {rate:.4g}, {rule}"
        sys.stdout.write(f"batch of {size:,} samples: {raised}. {why}\n")
        recorded = size, rate
    size, rate = recorded
    sys.stdout.flush()
    words = [*sys.orig_argv[1:], OFF, "--batch-size", str(size), "--lr", repr(rate)]
    os.execv(sys.executable, [sys.executable, *words])


def _recorded(folder: Path) -> tuple[int, float] | None:
    """Return batch size and learning rate of the run in `folder`, or None if it holds no run."""
    with suppress(OSError, ValueError, LookupError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int(config["batch_size"]), float(config["lr"])
    return None


def _largest(config: RunConfig) -> tuple[int, str]:
    """Return the largest batch that fits, at least the batch of `config`, and why the next does not fit."""
    limit = memory_limit_bytes() or psutil.virtual_memory().total
    size = config.batch_size
    while True:
        outcome = _try(size)
        if isinstance(outcome, str):
            return max(config.batch_size, size // 2), f"With {size:,} {outcome}"
        if 2 * outcome > limit:
            return size, f"With {2 * size:,} it might need more than the {limit / 2**30:.1f} GiB of this machine."
        size *= 2


def _try(size: int) -> int | str:
    """Return the host memory in bytes of a run with batches of `size`; or, as the end of a sentence, why its first
    steps fail."""
    with tempfile.TemporaryDirectory(prefix="toolkit-", ignore_cleanup_errors=True) as folder:
        run = Path(folder) / "run"
        words = [*sys.orig_argv[1:], *TRIAL, "--run-dir", str(run), "--batch-size", str(size)]
        with (Path(folder) / "said").open("w+") as said:
            trial = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=said)
            try:
                largest = 0
                while trial.poll() is None:
                    time.sleep(POLL_S)
                    largest = max(largest, _resident_bytes(trial.pid))
                    if (run / MICRO_BATCH_SIZE).exists():
                        return "a step ran out of memory."
                    *_, line = {"step": 0}, *read_metrics(run / "metrics.jsonl")
                    if line["step"] >= STEPS:
                        return largest if line["train/epoch"] <= 1 else f"an epoch has less than {STEPS} steps."
            finally:
                trial.kill()
                trial.wait()
            said.seek(0)
            last = next(reversed(said.read().splitlines()), f"it took less than {STEPS} steps.")
    return f"it ended: {last.removeprefix('error: ')}"


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (parent, *parent.children(recursive=True)))
    return 0
