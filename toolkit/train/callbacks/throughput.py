"""Speed and memory use."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.experts.parallel.collectives import extremes_over_ranks
from toolkit.experts.parallel.ownership import is_owned
from toolkit.experts.parallel.waits import Mark, mark, waits
from toolkit.run.hardware import peak_bytes, reset_peak
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from toolkit.train.trainer import Trainer


class Throughput(Callback):
    """Records `perf/samples_per_second`, `perf/step_time_ms` and `perf/peak_memory_bytes` at each log step;
    `perf/step_time_worst_rank_ms`; `perf/step_time_median_ms` and `perf/step_time_p95_ms` of this rank's steps, one
    by one (on a GPU as the host issues them, which may run ahead). On a GPU also `perf/gpu_utilization`, between 0 and
    1, as NVML measures it.

    Of several processes also `perf/slowest_rank`, whose steps take longest without what they spend in collectives, and
    `perf/slowest_rank_ratio`, how many times as long as the median of the other ranks'; `perf/collectives_ms`, what a
    step spends in collectives, waiting included, mean over ranks; and `perf/exchange_ms`, in the all-to-alls of experts
    alone. One reduction per log step sums all of them. With FSDP2, waiting for gradients counts as a rank's
    own time.

    Time runs in windows that end at a log step, where the host waits for the device anyway. An evaluation or a save
    restarts the window, so neither its time nor the steps before it in that window are counted. The peak is that of one
    process since training began, evaluations included: of this rank in a line, of the rank with most in the results.
    """

    state_attributes = ("_samples", "_seconds")

    def __init__(self) -> None:
        self._begin_at = (0.0, 0, 0)
        """Begin of the window: seconds on the host's clock, step and samples; 0 seconds before the first step."""
        self._samples = self._seconds = 0.0
        self._ends: list[float] = []
        self._world_size = 1
        self._hook: RemovableHandle | None = None
        self._gradient_done: Mark | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        self._world_size = trainer.run.world_size
        reset_peak(trainer.run.device)
        replicated = [p for p in trainer.parameters if not is_owned(p)]
        waits.on = self._world_size > 1
        if waits.on and replicated:
            # The gradients of the first layers are the last ones that a rank computes by itself.
            self._hook = replicated[0].register_post_accumulate_grad_hook(self._note_gradient)

    def on_step_start(self, trainer: Trainer, micro_batches: list[Any]) -> None:  # noqa: ARG002
        if self._begin_at[0] == 0.0:
            # A checkpoint may be loaded after `on_fit_start`.
            self._begin(trainer)

    def _note_gradient(self, parameter: Tensor) -> None:
        self._gradient_done = mark(parameter.device)

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        if self._gradient_done is not None:
            waits.add("gradients", self._gradient_done, mark(trainer.run.device))
            self._gradient_done = None

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
        self._compare_ranks(trainer, seconds, steps)
        single = sorted(after - before for before, after in pairwise([began, *self._ends]))
        trainer.record("perf/step_time_median_ms", 1e3 * median(single))
        trainer.record("perf/step_time_p95_ms", 1e3 * single[math.ceil(0.95 * len(single)) - 1])
        trainer.record("perf/peak_memory_bytes", peak_bytes(trainer.run.device))
        if trainer.run.device.type == "cuda":
            with suppress(Exception):  # no pynvml, no driver, or no permission: which of them depends on the machine
                trainer.record("perf/gpu_utilization", torch.cuda.utilization(trainer.run.device) / 100)
        self._begin(trainer)

    def _compare_ranks(self, trainer: Trainer, seconds: float, steps: int) -> None:
        taken = waits.take()
        own = seconds - sum(wait.seconds for wait in taken)
        exchange = sum(wait.seconds for wait in taken if wait.kind == "experts")
        table = torch.zeros(self._world_size, 3, dtype=torch.float32, device=trainer.run.device)
        table[trainer.run.rank] = 1e3 / steps * torch.tensor([seconds, own, exchange])
        if dist.is_initialized():
            dist.all_reduce(table)
        steps_ms, own_ms, exchange_ms = table.T.tolist()
        trainer.record("perf/step_time_worst_rank_ms", max(steps_ms))
        if self._world_size == 1:
            return
        slowest = own_ms.index(max(own_ms))
        ratio = own_ms[slowest] / median(own_ms[:slowest] + own_ms[slowest + 1 :])
        trainer.record("perf/slowest_rank", slowest)
        trainer.record("perf/slowest_rank_ratio", ratio)
        trainer.record("perf/collectives_ms", (sum(steps_ms) - sum(own_ms)) / self._world_size)
        trainer.record("perf/exchange_ms", sum(exchange_ms) / self._world_size)

    def _end_waits(self, *_: Any, **__: Any) -> None:
        waits.on = False
        waits.take()
        if self._hook is not None:
            self._hook.remove()

    on_exception = _end_waits

    def on_fit_end(self, trainer: Trainer) -> None:
        self._end_waits()
        peak, _ = extremes_over_ranks(torch.tensor(peak_bytes(trainer.run.device), device=trainer.run.device))
        trainer.results |= {
            "steps": trainer.state.step,
            "samples": trainer.state.samples,
            "epochs": trainer.state.step / trainer.batches.steps_per_epoch,
            "samples_per_second": self._samples / self._seconds if self._seconds else None,
            "train_seconds": self._seconds,
            "peak_memory_bytes": int(peak),
        }

    def _begin(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._begin_at = (time.perf_counter(), trainer.state.step, trainer.state.samples)
        self._ends = []
        waits.take()

    on_evaluate_end = on_save = _begin
