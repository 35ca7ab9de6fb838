"""What a training loop costs beyond the mathematics: ours beside loops written by hand and three other trainers.

    python benchmarks/speed/trainer_overhead.py                   one thread and two, about five minutes

An MLP 784-256-256-10 at batch 64 on a CPU, AdamW (fused, for all, so that loops are compared and not optimizers),
clipped to norm 1, on random images in float32. All contenders train in one process, with the settings of malloc and of
denormal numbers that `start_run` makes, in rounds in which each has its turn. The clock runs from the end of step
`--warmup` to the end of step `--warmup` + `--steps`. Figures are medians over rounds of ratios within a round.
Writes a table and benchmarks/results/trainer_overhead.json.
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
    """What every contender trains on, and when its clock runs."""

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
    """Notes the time at the end of each step; gives means over the steps after the warm-up."""

    def __init__(self, job: Job):
        self.job, self.step = job, 0
        self.wall = self.cpu = 0.0
        """Seconds per step; the CPU time of all threads."""

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


def by_hand(job: Job, batches: Iterator[tuple[Tensor, Tensor]], *, fused: bool = True) -> Clock:
    """The shortest loop there is: no metrics, no progress."""
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
    return by_hand(job, loader_batches(job))


def sliced_loop(job: Job) -> Clock:
    return by_hand(job, sliced_batches(job))


def dataloader_loop_default_adamw(job: Job) -> Clock:
    return by_hand(job, loader_batches(job), fused=False)


class Tick(Callback):
    """Calls `tick` at the end of each step."""

    def __init__(self, tick: Callable[[], None]):
        self.tick = tick

    def on_step_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        self.tick()


def ours(job: Job) -> Clock:
    """As a recipe: loss, accuracy, throughput and gradient norm to metrics.jsonl, progress on the console."""
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
    """The loop of Accelerate's documentation."""
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
    """The examples as HF Trainer wants them: one dictionary each."""

    def __init__(self, job: Job):
        self.job = job

    def __len__(self) -> int:
        return len(self.job.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"images": self.job.images[row], "labels": self.job.labels[row]}


class WithLoss(nn.Module):
    """A model as HF Trainer wants it: it computes its own loss."""

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
CONTENDERS: dict[str, Callable[[Job], Clock]] = {
    BASELINE: dataloader_loop,
    "loop by hand, slices": sliced_loop,
    "ours": ours,
    "bare Accelerate": bare_accelerate,
    "HF Trainer": hf_trainer,
    "Lightning": lightning_trainer,
    "loop by hand, DataLoader, default AdamW": dataloader_loop_default_adamw,
}
TARGETS = [(BASELINE, 1.0), ("loop by hand, slices", 0.85)]
"""Ours against these, at least; against the other trainers, more than 1."""


def measure(job: Job, rounds: int, threads: int, names: list[str]) -> list[dict[str, Any]]:
    """One row per contender. The first round warms up caches and imports, and is not counted."""
    torch.set_num_threads(threads)
    clocks: dict[str, list[Clock]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                clock = CONTENDERS[name](job)
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
    """A sentence for each target that was missed."""
    bars = dict(TARGETS)
    return [
        f"{row['threads']} thread(s): ours is {row['ours is faster by']} times {row['contender']}, wanted {bar}"
        for row in rows
        if row["contender"] != "ours" and row["ours is faster by"] < (bar := bars.get(row["contender"], 1.0))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count")
    parser.add_argument("--steps", type=int, default=400, help="timed steps per contender and round")
    parser.add_argument("--warmup", type=int, default=50, help="steps before the clock runs")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--samples", type=int, default=60_000, help="images, random")
    args = parser.parse_args()

    names = list(CONTENDERS)
    if importlib.util.find_spec("lightning") is None:
        names.remove("Lightning")
        print('Lightning is left out, because it is not installed: pip install "moe-toolkit[bench]"')
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
    print("\n".join(missed) or "every target is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
