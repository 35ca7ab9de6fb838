"""The setting `profile`: traces of a few steps, and which operations take the time, as torch's profiler writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, schedule
from torch.profiler import profile as torch_profile

from toolkit.run.folder import write_text
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.checkpointing import Checkpointing

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer

WARMUP_STEPS, STEPS, OPERATIONS = 10, 5, 30
FOLDER = "profile"


class Profile(Callback):
    """Profiles five steps after ten, once: a trace of each rank for Perfetto, and a table of its longest operations.

    A shorter run profiles its last steps. What is learned is the same as without it.
    """

    runs_after = (Checkpointing,)
    """`Checkpointing` knows the step at which training begins."""

    def __init__(self) -> None:
        self.profiler: torch_profile | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        left = trainer.max_steps - trainer.state.step
        steps = min(STEPS, left - 1)
        if steps < 1:
            trainer.run.print("profile=True: the run has too few steps: it needs one to warm up, and another one.")
            return
        on_gpu = trainer.run.device.type == "cuda"
        self.profiler = torch_profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=min(WARMUP_STEPS, left - steps) - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda profiler: self._write(trainer, profiler),
        )
        self.profiler.start()

    def on_step_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        if self.profiler is not None:
            self.profiler.step()

    def on_fit_end(self, *_: Any, **__: Any) -> None:
        if self.profiler is not None:
            self.profiler.on_trace_ready = None
            self.profiler.stop()

    on_exception = on_fit_end

    def _write(self, trainer: Trainer, profiler: torch_profile) -> None:
        run = trainer.run
        folder, name = run.folder / FOLDER, f"rank-{run.rank:05d}"
        folder.mkdir(exist_ok=True)
        trace = folder / f"trace-{name}.json.gz"
        trace.unlink(missing_ok=True)  # a link would be followed
        profiler.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if run.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=OPERATIONS)
        write_text(folder / f"operations-{name}.txt", table)
        run.print(f"profile in {folder}: traces for https://ui.perfetto.dev, and operations-{name}.txt")
