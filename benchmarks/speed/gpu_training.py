"""A language model of experts on one GPU: our trainer beside transformers' and a loop by hand; and three precisions.

    python benchmarks/speed/gpu_training.py              on a GPU, about ten minutes
    python benchmarks/speed/gpu_training.py --adapters   the same model frozen, with adapters of experts and attention
    python benchmarks/speed/gpu_training.py --rehearse   anywhere: a tiny model, to see that it runs

A Qwen3-MoE of 0.8 billion parameters, of which a token uses 0.13: eight layers of width 1,024, 64 experts of width 512,
top 8.
Blocks of 1,024 bytes of the sources of Python's standard library, AdamW (fused), clipped to norm 1, in bfloat16 under
autocast. Contenders have the same weights at the start, and take turns in rounds; the clock runs from the end of step
`--warmup` to the end of step `--warmup` + `--steps`. The rivals' experts are transformers' `grouped_mm`, the fastest
that it has of its own. Model FLOPs are three times those of the products and the attention of a forward; their share is
of the fastest square product that was measured in the same run. Of memory, activations are what remains of the peak
after weights, gradients and the states of AdamW. Of ours the profiler says how long the GPU is idle in a step, and how
often the host waits for it.

With `--adapters` the model's weights are bfloat16 and frozen, so two of a step's three products count; ours trains
beside experts in four bits, too.

A second table trains ours in float32, bfloat16 and float16, `--curve` steps each. Writes
benchmarks/results/gpu_training.json, gpu_precisions.json and docs/images/gpu_precisions.png; with `--adapters`
gpu_fine_tuning.json alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd import DeviceType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.report import write_report
from benchmarks.speed.gpu_layer import matrix_rate
from benchmarks.speed.trainer_overhead import Tick
from language.small_models import language_model_config
from toolkit.compat import FlopCounter
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.data.text import STDLIB, load_text
from toolkit.experts.hosts.peft.adapters import AdapterOptions, add_adapters
from toolkit.experts.hosts.spreading.spread import spread_experts
from toolkit.experts.hosts.transformers import causal_lm, experts_in_files, use_toolkit_kernel
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.run.config.run import RunConfig
from toolkit.run.run import start_run
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.progress import Progress
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.device_use import FORWARDS
from toolkit.train.optim import constant
from toolkit.train.profile import STEPS, Profile
from toolkit.train.tasks.language_modeling import LanguageModeling
from toolkit.train.trainer import Trainer

OURS, TRAINER, LOOP = "ours", "transformers Trainer", "loop by hand"
FOUR_BITS = "ours, experts in four bits"
PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
LOG_EVERY = 10
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
LEAST_TIMES_TRAINER = 1.2
"""The target: tokens per second."""


class Sizes(NamedTuple):
    dim: int
    layers: int
    heads: int
    experts: int
    top_k: int
    expert_hidden_size: int
    context: int
    batch: int
    """Blocks in a step."""


REAL = Sizes(1024, 8, 16, 64, 8, 512, 1024, 16)
REHEARSAL = Sizes(32, 2, 2, 4, 2, 16, 32, 4)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every contender trains, on what, and when its clock runs."""

    sizes: Sizes
    weights: dict[str, torch.Tensor]
    blocks: TensorTable
    """Column "tokens" (N, context + 1)."""
    device: torch.device
    warmup: int
    steps: int
    folder: Path | None = None
    """Has the model as files, where adapters are trained."""

    @property
    def max_steps(self) -> int:
        return self.warmup + self.steps

    def model(self, experts_implementation: str, *, quantize: Literal["4bit"] | None = None) -> nn.Module:
        if self.folder is not None:
            ours = experts_implementation == use_toolkit_kernel()
            with experts_in_files(quantize=quantize) if ours else contextlib.nullcontext():
                base: Any = causal_lm(self.folder, dtype=torch.bfloat16, experts_implementation=experts_implementation)
            base.to(device=self.device)
            adapted = add_adapters(base, AdapterOptions())
            if ours:
                spread_experts(adapted, ExpertGroups())
            return adapted
        with self.device:  # where random weights take the least time
            model: nn.Module = causal_lm(configuration(self.sizes), experts_implementation=experts_implementation)
        model.load_state_dict(self.weights)
        return model.to(self.device)

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4, fused=True)


class Clock:
    """Seconds of the steps after the warm-up, on the device's own time, and its memory."""

    def __init__(self, job: Job):
        self.job, self.step, self.seconds = job, 0, 0.0
        self.peak = 0
        """Bytes; 0 on a CPU."""
        self.facts: dict[str, Any] = {}

    def tick(self) -> None:
        self.step += 1
        on_gpu = self.job.device.type == "cuda"
        if self.step in (self.job.warmup, self.job.max_steps):
            if on_gpu:
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.seconds
        if on_gpu and self.step == self.job.warmup:
            torch.cuda.reset_peak_memory_stats()
        if on_gpu and self.step == self.job.max_steps:
            self.peak = torch.cuda.max_memory_allocated()


def configuration(sizes: Sizes) -> Any:
    shape = sizes._asdict()
    del shape["batch"]
    return language_model_config("qwen3_moe", vocab_size=256, **shape)


def ours(
    job: Job,
    *callbacks: Callback,
    precision: str = "bf16",
    folder: Path | None = None,
    quantize: Literal["4bit"] | None = None,
) -> Clock:
    """As a recipe: metrics to a file, progress on the console. `folder`: of the run, which else is forgotten."""
    clock = Clock(job)
    with tempfile.TemporaryDirectory() as scratch:
        config = RunConfig(
            run_dir=folder or Path(scratch) / "run",
            cpu=job.device.type == "cpu",
            mixed_precision=precision,  # type: ignore[arg-type]
            tracker="none",
            batch_size=job.sizes.batch,
            log_every=LOG_EVERY,
        )
        with start_run("gpu_training", config) as run:
            model = job.model(use_toolkit_kernel(), quantize=quantize)
            trainer = Trainer(
                run,
                LanguageModeling(),
                model,
                job.adamw(model),
                TrainBatches(job.blocks, batch_size=job.sizes.batch, seed=0, device=run.device),
                max_steps=job.max_steps,
                schedule=constant(),
                log_every=LOG_EVERY,
                callbacks=[Throughput(), Progress(), Tick(clock.tick), *callbacks],
            )
            clock.facts = trainer.fit()
    return clock


def loop_by_hand(job: Job) -> Clock:
    """The shortest loop there is: no metrics, no progress."""
    model: Any = job.model("grouped_mm")
    optimizer = job.adamw(model)
    clock = Clock(job)
    model.train()
    for ids, following in itertools.islice(batches(job), job.max_steps):
        with torch.autocast(job.device.type, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, shift_labels=following).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    return clock


def batches(job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids, and those that follow them."""
    draws = torch.Generator().manual_seed(0)
    while True:
        for rows in torch.randperm(len(job.blocks), generator=draws).split(job.sizes.batch):
            if len(rows) == job.sizes.batch:
                tokens = job.blocks[rows]["tokens"].long().to(job.device, non_blocking=True)
                yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def under_transformers(job: Job) -> Clock:
    import transformers

    transformers.logging.set_verbosity_error()
    clock = Clock(job)

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in job.blocks.columns["tokens"].long()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=job.model("grouped_mm"),
            args=transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=job.sizes.batch,
                max_steps=job.max_steps,
                learning_rate=3e-4,
                lr_scheduler_type="constant",
                bf16=True,
                optim="adamw_torch_fused",
                max_grad_norm=1.0,
                logging_steps=LOG_EVERY,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=job.device.type == "cpu",
            ),
            train_dataset=rows,
            callbacks=[Ticks()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return clock


CONTENDERS: dict[str, Callable[[Job], Clock]] = {OURS: ours, TRAINER: under_transformers, LOOP: loop_by_hand}
WITH_ADAPTERS: dict[str, Callable[[Job], Clock]] = {
    OURS: ours,
    FOUR_BITS: partial(ours, quantize="4bit"),
    TRAINER: under_transformers,
    LOOP: loop_by_hand,
}


def idle_and_waits(profile: Profile) -> tuple[float | None, float | None]:
    """Returns the share of the profiled steps in which the GPU was idle, and how often a step waited for it."""
    assert profile.profiler is not None
    events = profile.profiler.key_averages()
    steps = [event for event in events if event.key.startswith("ProfilerStep") and event.device_type == DeviceType.CPU]
    if not torch.cuda.is_available():
        return None, None
    kernels = [each for each in events if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
    busy = sum(event.self_device_time_total for event in kernels)
    total = sum(event.cpu_time_total for event in steps)
    # One is the profiler's, which waits for the device when it stops.
    waits = max(0, sum(event.count for event in events if event.key in SYNCS) - 1)
    return max(0.0, 1 - busy / total), waits / STEPS


def race(job: Job, rounds: int, rate: float) -> list[dict[str, Any]]:
    """One row per contender. The first round warms up, and is not counted."""
    contenders = CONTENDERS if job.folder is None else WITH_ADAPTERS
    clocks: dict[str, list[Clock]] = {name: [] for name in contenders}
    for turn, name in itertools.product(range(rounds + 1), contenders):
        clock = quietly(lambda name=name: contenders[name](job))  # type: ignore[misc]
        if turn:
            clocks[name].append(clock)
    profile = Profile()
    quietly(lambda: ours(job, profile))
    gpu_idle, host_waits = idle_and_waits(profile)
    tokens, flops = job.sizes.batch * job.sizes.context, flops_of_step(job)
    model = job.model(use_toolkit_kernel())
    weights = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    del model
    rows = []
    for name, each in clocks.items():
        step = statistics.median(clock.seconds for clock in each) / job.steps
        ratios = [mine.seconds / other.seconds for mine, other in zip(each, clocks[OURS], strict=True)]
        gib: dict[str, float] = {"weights": weights, "gradients": trained, "AdamW": 2 * trained}
        if name == FOUR_BITS:
            gib["weights"] = sum(p.nbytes for p in job.model(use_toolkit_kernel(), quantize="4bit").parameters())
        gib["activations"] = max(0, statistics.median(clock.peak for clock in each) - sum(gib.values()))
        rows.append(
            {
                "contender": name,
                "tokens per second": round(tokens / step),
                "ours is faster by": round(statistics.median(ratios), 3),
                "of the chip's products": round(flops / step / rate, 3),
                **{f"{part}, GiB": round(value / 2**30, 2) for part, value in gib.items()},
                "GPU idle": gpu_idle if name == OURS else None,
                "host waits per step": host_waits if name == OURS else None,
            }
        )
    return rows


def flops_of_step(job: Job) -> float:
    """Of products and attention, forward and backward; of frozen weights no gradients are computed."""
    model: Any = job.model(use_toolkit_kernel())
    with FlopCounter() as counter, torch.no_grad():
        model(input_ids=next(batches(job))[0])
    return float((FORWARDS if job.folder is None else FORWARDS - 1) * counter.flops)


def check_losses(job: Job) -> None:
    """Raise RuntimeError where the contenders' models do not compute the same."""
    ids, _ = next(batches(job))
    with torch.no_grad():
        found = [job.model(each)(input_ids=ids, labels=ids).loss for each in (use_toolkit_kernel(), "grouped_mm")]
    if not torch.allclose(found[0], found[1], rtol=1e-3):
        raise RuntimeError(f"the contenders do not compute the same: {found}")


def compare_precisions(job: Job, picture: Path | None) -> list[dict[str, Any]]:
    """One row per precision; the curves of their losses in `picture`."""
    rows, curves = [], {}
    for precision, name in PRECISIONS.items():
        if precision == "fp16" and job.device.type == "cpu":
            continue  # which Accelerate offers on GPUs only
        losses = Losses()
        clock = quietly(lambda precision=precision, losses=losses: ours(job, losses, precision=precision))  # type: ignore[misc]
        curves[name] = losses.found
        tokens = job.steps * job.sizes.batch * job.sizes.context
        rows.append(
            {
                "precision": name,
                "loss, last tenth of the steps": round(
                    statistics.mean(losses.found[-max(1, len(losses.found) // 10) :]), 4
                ),
                "tokens per second": round(tokens / clock.seconds),
                "peak, GiB": round(clock.peak / 2**30, 2),
            }
        )
    if picture is not None:
        draw(curves, picture)
    return rows


class Losses(Callback):
    """The mean loss of every `LOG_EVERY` steps."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.at_log_step:
            self.found.append(trainer.sums.compute()["loss"])


def draw(curves: dict[str, list[float]], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--", ":"), strict=False):
        steps = [LOG_EVERY * (index + 1) for index in range(len(losses))]
        axes.plot(steps, losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="One model in three precisions")
    axes.legend()
    figure.savefig(picture, dpi=150)


def quietly(run: Callable[[], Clock]) -> Clock:
    """`run()` without what it prints, and with the memory of the one before freed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (3)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per contender and round (30)")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the clock runs (10)")
    parser.add_argument("--curve", type=int, default=300, help="steps in each precision (300)")
    parser.add_argument("--adapters", action="store_true", help="of a frozen model")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on whatever device there is")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not arguments.rehearse and not on_gpu:
        raise SystemExit("error: this machine has no GPU: use --rehearse to see that the benchmark runs.")
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes = REHEARSAL if arguments.rehearse else REAL
    how: dict[str, Any] = {"tokenizer": "bytes", "block_size": sizes.context, "batch_size": sizes.batch}
    data = load_text(STDLIB, None, **how, on_main=lambda decide: decide())
    torch.manual_seed(0)
    weights = causal_lm(configuration(sizes)).state_dict()
    job = Job(
        sizes=sizes,
        weights=weights,
        blocks=data.train,
        device=device,
        warmup=arguments.warmup,
        steps=arguments.steps,
    )
    rate = matrix_rate(device, torch.bfloat16, [64] if arguments.rehearse else [4096, 8192, 16384])
    facts = {"teraflops_per_second": round(rate / 1e12, 1), "rounds": arguments.rounds}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.adapters:
            job = replace(job, folder=Path(folder))
            saved: Any = causal_lm(configuration(sizes))
            saved.load_state_dict(weights)
            saved.to(dtype=torch.bfloat16)
            saved.save_pretrained(folder)
        check_losses(job)
        rows = race(job, arguments.rounds, rate)
    if not arguments.rehearse:  # before the second table, so that who ends it has the first
        write_report("gpu_fine_tuning" if arguments.adapters else "gpu_training", rows, **facts)
    if arguments.adapters:
        if arguments.rehearse:
            print(*rows, sep="\n")
        return 0
    job = Job(sizes=sizes, weights=weights, blocks=data.train, device=device, warmup=1, steps=arguments.curve - 1)
    picture = None if arguments.rehearse else ROOT / "docs" / "images" / "gpu_precisions.png"
    precisions = compare_precisions(job, picture)
    if arguments.rehearse:
        print(*rows, *precisions, sep="\n")
        return 0
    write_report("gpu_precisions", precisions, steps=arguments.curve)
    reached = next(row["ours is faster by"] for row in rows if row["contender"] == TRAINER)
    if reached < LEAST_TIMES_TRAINER:
        print(f"ours has {reached} times Trainer's tokens per second, wanted {LEAST_TIMES_TRAINER}")
    return int(reached < LEAST_TIMES_TRAINER)


if __name__ == "__main__":
    sys.exit(main())
