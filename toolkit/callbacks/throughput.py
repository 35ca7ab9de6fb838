"""Speed and memory use."""

from __future__ import annotations

import math
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.trainer import Trainer


class _Window(Callback):
    """Measures consecutive steps, with neither an evaluation nor a save between them."""

    def __init__(self) -> None:
        self._begin_at = (0.0, 0, 0)
        """Seconds on the host's clock, step and samples; 0 seconds before the first step."""

    def on_step_start(self, trainer: Trainer, micro_batches: list[Any]) -> None:  # noqa: ARG002
        if self._begin_at[0] == 0.0:
            # A checkpoint may be loaded after `on_fit_start`.
            self._begin(trainer)

    def on_evaluate_end(self, trainer: Trainer, name: str, metrics: dict[str, float]) -> None:  # noqa: ARG002
        self._begin(trainer)

    def on_save(self, trainer: Trainer, folder: Path) -> None:  # noqa: ARG002
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self._begin_at = (time.perf_counter(), trainer.state.step, trainer.state.samples)


class BarrierWait(_Window):
    """Records `perf/barrier_wait_share` with each line of metrics of several processes: how long a rank that is done
    with the line's last step waits for the slowest, over the time of a step; mean over ranks.

    One barrier per line, none on other steps. Ranks also wait for each other within a step, in every all-to-all: that
    is not included, see `moe/rank_imbalance`.
    """

    runs_before = (Callback,)
    """Another callback's collective would hold the ranks up first, and the wait would be measured as zero."""

    def on_step_end(self, trainer: Trainer) -> None:
        steps = trainer.state.step - self._begin_at[1]
        if not trainer.at_log_step or trainer.run.world_size == 1 or steps == 0:
            return
        if trainer.run.device.type != "cpu":
            torch.accelerator.synchronize()
        done = time.perf_counter()
        # A reduction whose result is read holds the host on every backend, as a barrier of NCCL may not.
        barrier = torch.zeros((), device=trainer.run.device)
        dist.all_reduce(barrier)
        barrier.item()
        step_seconds = (done - self._begin_at[0]) / steps
        share = torch.tensor((time.perf_counter() - done) / step_seconds, device=trainer.run.device)
        dist.all_reduce(share)
        trainer.record("perf/barrier_wait_share", share / trainer.run.world_size)
        self._begin(trainer)


class Throughput(_Window):
    """Records `perf/samples_per_second`, `perf/step_time_ms` and `perf/peak_memory_bytes` with each line of metrics;
    `perf/step_time_worst_rank_ms`; `perf/step_time_median_ms` and `perf/step_time_p95_ms` of this rank's steps, one
    by one (on a GPU as the host issues them, which may run ahead).

    Time runs in windows that end at a log step, where the host waits for the device anyway. An evaluation or a save
    restarts the window, so neither its time nor the steps before it in that window are counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._samples = self._seconds = 0.0
        self._ends: list[float] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.run.device)

    def on_step_end(self, trainer: Trainer) -> None:
        self._ends.append(time.perf_counter())
        if not trainer.at_log_step:
            return
        if trainer.run.device.type != "cpu":
            torch.accelerator.synchronize()
        began, step, samples = self._begin_at
        seconds = time.perf_counter() - began
        samples, steps = trainer.state.samples - samples, trainer.state.step - step
        if steps == 0:
            return
        self._samples, self._seconds = self._samples + samples, self._seconds + seconds
        trainer.record("perf/samples_per_second", samples / seconds)
        trainer.record("perf/step_time_ms", 1e3 * seconds / steps)
        worst = torch.tensor(1e3 * seconds / steps, device=trainer.run.device)
        if dist.is_initialized():
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        single = sorted(after - before for before, after in pairwise([began, *self._ends]))
        trainer.record("perf/step_time_worst_rank_ms", worst)
        trainer.record("perf/step_time_median_ms", 1e3 * median(single))
        trainer.record("perf/step_time_p95_ms", 1e3 * single[math.ceil(0.95 * len(single)) - 1])
        trainer.record("perf/peak_memory_bytes", peak_memory_bytes(trainer.run.device))
        self._begin(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        peak = torch.tensor(float(peak_memory_bytes(trainer.run.device)), device=trainer.run.device)
        if dist.is_initialized():
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        trainer.results |= {
            "steps": trainer.state.step,
            "samples": trainer.state.samples,
            "epochs": trainer.state.step / trainer.batches.steps_per_epoch,
            "samples_per_second": self._samples / self._seconds if self._seconds else None,
            "train_seconds": self._seconds,
            "peak_memory_bytes": int(peak),
        }

    def _begin(self, trainer: Trainer) -> None:
        super()._begin(trainer)
        self._ends = []

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._samples, "seconds": self._seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._samples = state["samples"]
        self._seconds = state["seconds"]


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process held: what torch allocated on a GPU, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
