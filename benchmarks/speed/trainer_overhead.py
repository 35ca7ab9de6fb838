"""Overhead of the training loop: the toolkit's trainer, plain loops and three other trainers.

    python benchmarks/speed/trainer_overhead.py                   one thread and two, about five minutes

An MLP 784-256-256-10 with batch size 64 on a CPU, on random images in float32, with fused AdamW and clipping to norm 1.
All variants train in one process, with the malloc and denormal settings of `start_run`, in interleaved rounds. The
clock runs from the end of step `--warmup` to the end of step `--warmup` + `--steps`. Values are medians over rounds of
ratios within a round. Writes benchmarks/results/trainer_overhead.json; exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.run.config.run import RunConfig
from toolkit.run.run import start_run
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.progress import Progress
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.models.mlp import MLP
from toolkit.train.optim import constant
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer

BATCH, MAX_NORM, LOG_EVERY = 64, 1.0, 50


@dataclass(frozen=True, kw_only=True)
class Job:
    """Data and timed steps of every variant."""

    images: Tensor
    """float32 (N, 784)."""
    labels: Tensor
    """int64 (N)."""
    warmup: int
    steps: int

    @property
    def max_steps(self) -> int:
        return self.warmup + self.steps


class Clock:
    """Mean times of the steps after the warm-up."""

    def __init__(self, job: Job):
        self.job, self.step = job, 0
        self.wall = self.cpu = 0.0
        """Seconds per step; `cpu` counts all threads."""

    def tick(self) -> None:
        self.step += 1
        if self.step == self.job.warmup:
            self.wall, self.cpu = time.perf_counter(), time.process_time()
        if self.step == self.job.max_steps:
            self.wall = (time.perf_counter() - self.wall) / self.job.steps
            self.cpu = (time.process_time() - self.cpu) / self.job.steps


def build(*, fused: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MLP(784, 256, 256, 10)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True if fused else None)


def loader_batches(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    loader = DataLoader(TensorDataset(job.images, job.labels), batch_size=BATCH, shuffle=True)
    while True:
        yield from loader


def sliced_batches(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        order = torch.randperm(len(job.labels))
        for rows in order.split(BATCH):
            yield job.images[rows], job.labels[rows]


def plain_loop(job: Job, batches: Iterator[tuple[Tensor, Tensor]], *, fused: bool = True) -> Clock:
    """Train without metrics and progress."""
    model, optimizer = build(fused=fused)
    clock = Clock(job)
    for _ in range(job.max_steps):
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    return clock


def dataloader_loop(job: Job) -> Clock:
    return plain_loop(job, loader_batches(job))


def sliced_loop(job: Job) -> Clock:
    return plain_loop(job, sliced_batches(job))


def dataloader_loop_default_adamw(job: Job) -> Clock:
    return plain_loop(job, loader_batches(job), fused=False)


class Tick(Callback):
    """Calls `tick` at the end of each step."""

    def __init__(self, tick: Callable[[], None]):
        self.tick = tick

    def on_step_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        self.tick()


def toolkit_trainer(job: Job) -> Clock:
    """Train as a recipe does, with metrics in a file and progress on the console."""
    model, optimizer = build()
    clock = Clock(job)
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            run_dir=Path(folder) / "run", cpu=True, tracker="none", batch_size=BATCH, log_every=LOG_EVERY
        )
        with start_run("overhead", config) as run:
            trainer = Trainer(
                run,
                Classification(),
                model,
                optimizer,
                TrainBatches(TensorTable(input=job.images, label=job.labels), batch_size=BATCH, seed=0),
                max_steps=job.max_steps,
                schedule=constant(),
                max_grad_norm=MAX_NORM,
                log_every=LOG_EVERY,
                callbacks=[Throughput(), Progress(), Tick(clock.tick)],
            )
            trainer.fit()
            lines = (run.folder / "metrics.jsonl").read_text().count("\n")
    assert lines >= job.max_steps // LOG_EVERY, "metrics were not written"
    return clock


def bare_accelerate(job: Job) -> Clock:
    """Train with the loop of Accelerate's documentation."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(job.images, job.labels), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(*build(), loader)
    clock = Clock(job)
    while clock.step < job.max_steps:
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            clock.tick()
            if clock.step == job.max_steps:
                break
    return clock


class Examples(Dataset[dict[str, Tensor]]):
    """Dictionary samples for HF Trainer."""

    def __init__(self, job: Job):
        self.job = job

    def __len__(self) -> int:
        return len(self.job.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"images": self.job.images[row], "labels": self.job.labels[row]}


class WithLoss(nn.Module):
    """Model with a loss for HF Trainer."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def hf_trainer(job: Job) -> Clock:
    import transformers

    transformers.logging.set_verbosity_error()
    model, optimizer = build()
    clock = Clock(job)

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=WithLoss(model),
            args=transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=BATCH,
                max_steps=job.max_steps,
                max_grad_norm=MAX_NORM,
                logging_steps=LOG_EVERY,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Examples(job),
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
            callbacks=[Ticks()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return clock


def lightning_trainer(job: Job) -> Clock:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, optimizer = build()
    clock = Clock(job)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            images, labels = batch
            return F.cross_entropy(self.model(images), labels)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=job.max_steps,
        gradient_clip_val=MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(job.images, job.labels), batch_size=BATCH, shuffle=True))
    return clock


BASELINE = "loop by hand, DataLoader"
VARIANTS: dict[str, Callable[[Job], Clock]] = {
    BASELINE: dataloader_loop,
    "loop by hand, slices": sliced_loop,
    "ours": toolkit_trainer,
    "bare Accelerate": bare_accelerate,
    "HF Trainer": hf_trainer,
    "Lightning": lightning_trainer,
    "loop by hand, DataLoader, default AdamW": dataloader_loop_default_adamw,
}
TARGETS = [(BASELINE, 1.0), ("loop by hand, slices", 0.85)]
"""Minimum speed relative to plain loops; relative to other trainers it is 1."""


def measure(job: Job, rounds: int, threads: int, names: list[str]) -> list[dict[str, Any]]:
    """Return a row for each variant; the first round is a warm-up."""
    torch.set_num_threads(threads)
    clocks: dict[str, list[Clock]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                clock = VARIANTS[name](job)
            if turn:
                clocks[name].append(clock)

    def ratio(name: str, other: str) -> float:
        return statistics.median(b.wall / a.wall for a, b in zip(clocks[name], clocks[other], strict=True))

    return [
        {
            "threads": threads,
            "contender": name,
            "microseconds per step": round(1e6 * statistics.median(clock.wall for clock in clocks[name])),
            "of CPU": round(1e6 * statistics.median(clock.cpu for clock in clocks[name])),
            "speed of the DataLoader loop": round(ratio(name, BASELINE), 2),
            "ours is faster by": round(ratio("ours", name), 2),
        }
        for name in names
    ]


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """Return a message for each missed target."""
    targets = dict(TARGETS)
    return [
        f"{row['threads']} thread(s): {row['ours is faster by']} times {row['contender']}, target {target}"
        for row in rows
        if row["contender"] != "ours" and row["ours is faster by"] < (target := targets.get(row["contender"], 1.0))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds. Default: 9")
    parser.add_argument("--steps", type=int, default=400, help="timed steps per variant and round. Default: 400")
    parser.add_argument("--warmup", type=int, default=50, help="warm-up steps. Default: 50")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--samples", type=int, default=60_000, help="number of random images. Default: 60,000")
    args = parser.parse_args()

    names = list(VARIANTS)
    if importlib.util.find_spec("lightning") is None:
        names.remove("Lightning")
        print('Lightning is not installed and skipped. Run: pip install "moe-toolkit[bench]"')
    warnings.simplefilter("ignore")
    draws = torch.Generator().manual_seed(0)
    job = Job(
        images=torch.rand(args.samples, 784, generator=draws),
        labels=torch.randint(10, (args.samples,), generator=draws),
        warmup=args.warmup,
        steps=args.steps,
    )
    rows = [row for threads in args.threads for row in measure(job, args.rounds, threads, names)]
    write_report("trainer_overhead", rows, rounds=args.rounds, steps=args.steps, batch_size=BATCH)
    missed = judge(rows)
    print("\n".join(missed) or "all targets are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
