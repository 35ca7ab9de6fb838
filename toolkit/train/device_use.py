"""How much of its devices a run uses: model FLOPs per second, their share of the peak, and a GPU's utilisation."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.data.table import Batch
from toolkit.experts.compat import FlopCounter
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.task import Loss, Task

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer

FORWARDS = 3
"""What a step computes over what its forward does: the backward has two matrix products for each (Kaplan et al. 2020,
arXiv 2001.08361, section 2.1; Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI300X": 1307e12,
}
"""Dense FLOPs per second in bf16 (fp16 before Ampere) of a chip, from its data sheet, by a word of its name."""


def peak_flops_of(name: str) -> float | None:
    """Returns that of the chip that torch calls `name`; None where it is not in the table."""
    return next((peak for word, peak in PEAK_FLOPS.items() if re.search(rf"\b{word}\b", name)), None)


class DeviceUse(Callback):
    """Records `perf/model_flops_per_second`, `perf/mfu` and `perf/gpu_utilization` with each line of metrics.

    The model FLOPs of a sample are `FORWARDS` times those of matrix products, convolutions and attention in the
    forwards of the first step of this process, over all ranks. They are counted as they run, so of experts only the
    rows that were sent to them, and what a backward computes again does not count. Not with `--compile`, whose forward
    cannot be counted without changing it. `perf/mfu` is their rate over `peak_flops` per process, or what the data
    sheet of the chip says for bf16; there is none for other chips. `perf/gpu_utilization`, between 0 and 1, is what
    NVML says of the first process's GPU.
    """

    runs_after = (Throughput,)

    def __init__(self, throughput: Throughput):
        self.throughput = throughput
        self.peak_flops: float | None = None
        self._counter: FlopCounter | None = None
        self._flops_per_sample: float | None = None
        self._has_nvml = True

    def on_fit_start(self, trainer: Trainer) -> None:
        device = trainer.run.device
        if device.type == "cuda":
            self.peak_flops = peak_flops_of(torch.cuda.get_device_name(device))
        self._has_nvml = device.type == "cuda"
        self._counts = not trainer.run.config.compile

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        if self._counts and self._counter is None:
            self._counter = FlopCounter()
            self._samples = trainer.batches.samples_of(trainer.state.step)
            trainer.task = _Counted(trainer.task, self._counter)

    def on_step_end(self, trainer: Trainer) -> None:
        if isinstance(trainer.task, _Counted):
            trainer.task = trainer.task.task
        speed = self.throughput.samples_per_second
        if not trainer.at_log_step or speed is None:
            return
        per_sample = None if self._counter is None else self._model_flops_per_sample(trainer)
        if per_sample is not None:
            trainer.record("perf/model_flops_per_second", per_sample * speed)
            if self.peak_flops is not None:
                trainer.record("perf/mfu", per_sample * speed / (self.peak_flops * trainer.run.world_size))
        if self._has_nvml:
            try:
                trainer.record("perf/gpu_utilization", torch.cuda.utilization(trainer.run.device) / 100)
            except Exception:  # no pynvml, no driver, or no permission: which of them depends on the machine
                self._has_nvml = False

    def _model_flops_per_sample(self, trainer: Trainer) -> float | None:
        """Returns None where a rank could not count them. A collective the first time."""
        if self._flops_per_sample is None:
            assert self._counter is not None
            counted = math.nan if self._counter.uncounted else float(self._counter.flops)
            flops = torch.tensor(counted, dtype=torch.float64, device=trainer.run.device)
            if dist.is_initialized():
                dist.all_reduce(flops)
            self._flops_per_sample = FORWARDS * flops.item() / self._samples
            if math.isnan(self._flops_per_sample):
                what = self._counter.uncounted or "an operation on another process"
                trainer.run.print(f"perf/model_flops_per_second: left out, torch cannot count {what}.")
        return None if math.isnan(self._flops_per_sample) else self._flops_per_sample


class _Counted:
    """A task whose training forwards are counted."""

    def __init__(self, task: Task, counter: FlopCounter):
        self.task, self.counter = task, counter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        with self.counter:
            return self.task.loss(model, batch)
