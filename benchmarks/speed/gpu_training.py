"""Training an MoE language model on one GPU: the toolkit's trainer, transformers' Trainer and a plain loop.

    python benchmarks/speed/gpu_training.py              on a GPU, about six minutes
    python benchmarks/speed/gpu_training.py --rehearse   on any device: a tiny model; writes nothing

A Qwen3-MoE with 2.5 billion parameters, 0.2 billion active: four layers, width 2,048, 128 experts of width 768, top 8,
as in Qwen3-30B-A3B. With gradients, AdamW states and activations it needs about 57 GiB. Data are blocks of 1,024 bytes
of the sources of Python's standard library. Training uses fused AdamW, clipping to norm 1 and bfloat16 autocast.
Variants have the same initial weights and run in interleaved rounds; the clock runs from the end of step `--warmup` to
the end of step `--warmup` + `--steps`. A failing variant has a row with its error.

The baselines use transformers' `grouped_mm`, its fastest experts implementation. Autocast does not cover it, so under a
Trainer with `bf16=True` it computes in float32: the row "as it comes". The other baselines cast its operands to
bfloat16.

MFU is three times the FLOPs of matrix products and attention in a forward pass, relative to the fastest square product
in the same run. Activation memory is the peak minus weights, gradients and AdamW states. For the toolkit, the profiler
measures GPU idle time and host syncs per step. Writes benchmarks/results/gpu_training.json; exit code 1 if the toolkit
has less than 1.2 times the throughput of Trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.report import write_report
from benchmarks.speed.gpu_layer import matrix_rate
from benchmarks.speed.trainer_overhead import Tick
from language.small_models import language_model_config
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.data.text import STDLIB, load_text
from toolkit.errors import one_line
from toolkit.experts.layer.grouped_mm import cast_as_autocast_would
from toolkit.integrations.transformers import causal_lm, use_toolkit_kernel
from toolkit.run.config.run import RunConfig
from toolkit.run.run import start_run
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.profile import STEPS, Profile
from toolkit.train.callbacks.progress import Progress
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.optim import constant
from toolkit.train.tasks.language_modeling import LanguageModeling
from toolkit.train.trainer import Trainer

OURS, TRAINER, LOOP = "ours", "transformers Trainer", "loop by hand"
AS_IT_COMES = "transformers Trainer, as it comes"
STOCK, CAST = "grouped_mm", "grouped_mm_as_autocast_would"
"""transformers' experts, unmodified and in the dtype of autocast."""
LOG_EVERY = 10
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
LEAST_TIMES_TRAINER = 1.2
"""Target: relative tokens per second."""
FORWARDS = 3
"""FLOPs of a step relative to its forward pass (Kaplan et al. 2020, arXiv 2001.08361, section 2.1)."""
ATTENTION = {
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
}
"""Attention without usable FLOP formulas in torch: none for the last, and before torch 2.13 the formulas of the others
do not support fewer key heads than query heads."""


class FlopCounter(TorchDispatchMode):
    """Counter of the FLOPs in a context, with torch's formulas and additional ones. Changes no results."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = func.overloadpacket
        if operation in ATTENTION:
            query_BHSD, key_BHSD, value_BHSD = args[:3]
            widths = query_BHSD.shape[-1] + value_BHSD.shape[-1]
            self.flops += 2 * query_BHSD.shape[:-1].numel() * key_BHSD.shape[-2] * widths
        elif operation is torch.ops.aten._grouped_mm:
            self.flops += 2 * result.numel() * args[0].shape[-1]
        elif operation in flop_registry:
            self.flops += flop_registry[operation](*args, **kwargs, out_val=result)
        return result


class Sizes(NamedTuple):
    dim: int
    layers: int
    heads: int
    experts: int
    top_k: int
    expert_hidden_size: int
    context: int
    batch: int
    """Blocks per step."""


REAL = Sizes(2048, 4, 32, 128, 8, 768, 1024, 16)
REHEARSAL = Sizes(32, 2, 2, 4, 2, 16, 32, 4)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Model, data and timed steps of every variant."""

    sizes: Sizes
    blocks: TensorTable
    """Column "tokens" (N, context + 1)."""
    device: torch.device
    warmup: int
    steps: int

    @property
    def max_steps(self) -> int:
        return self.warmup + self.steps

    def model(self, experts_implementation: str) -> nn.Module:
        """Return a model with the same weights each time, drawn on the device for speed."""
        shape = self.sizes._asdict()
        del shape["batch"]
        torch.manual_seed(0)
        with self.device:
            config = language_model_config("qwen3_moe", vocab_size=256, **shape)
            return causal_lm(config, experts_implementation=experts_implementation)

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


class Clock:
    """Seconds of the steps after the warm-up, synchronized with the device, and peak memory."""

    def __init__(self, job: Job):
        self.job, self.step, self.seconds = job, 0, 0.0
        self.peak = 0
        """Bytes; 0 on a CPU."""

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


class Cast:
    """Experts of transformers with weights in the dtype of autocast."""

    def __init__(self, experts: nn.Module):
        self.experts = experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.experts, name)
        return cast_as_autocast_would(value)[0] if isinstance(value, torch.Tensor) else value


def use_cast_experts() -> None:
    """Register `CAST` with transformers."""
    multiply: Any = ALL_EXPERTS_FUNCTIONS[STOCK]

    def forward(experts: nn.Module, x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = multiply(Cast(experts), *cast_as_autocast_would(x), *rest, **options)
        return result

    ALL_EXPERTS_FUNCTIONS.register(CAST, forward)


def toolkit_trainer(job: Job, *callbacks: Callback) -> Clock:
    """Train as a recipe does, with metrics in a file and progress on the console."""
    clock = Clock(job)
    with tempfile.TemporaryDirectory() as scratch:
        config = RunConfig(
            run_dir=Path(scratch) / "run",
            cpu=job.device.type == "cpu",
            mixed_precision="bf16",
            tracker="none",
            batch_size=job.sizes.batch,
            log_every=LOG_EVERY,
        )
        with start_run("gpu_training", config) as run:
            model = job.model(use_toolkit_kernel())
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
            trainer.fit()
    return clock


def plain_loop(job: Job) -> Clock:
    """Train without metrics and progress."""
    model: Any = job.model(CAST)
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
    """Yield input ids and next ids."""
    draws = torch.Generator().manual_seed(0)
    while True:
        for rows in torch.randperm(len(job.blocks), generator=draws).split(job.sizes.batch):
            if len(rows) == job.sizes.batch:
                tokens = job.blocks[rows]["tokens"].long().to(job.device, non_blocking=True)
                yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def transformers_trainer(job: Job, *, experts_implementation: str = CAST) -> Clock:
    import transformers

    transformers.logging.set_verbosity_error()
    clock = Clock(job)

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in job.blocks.columns["tokens"].long()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=job.model(experts_implementation),
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


VARIANTS: dict[str, Callable[[Job], Clock]] = {
    OURS: toolkit_trainer,
    TRAINER: transformers_trainer,
    LOOP: plain_loop,
    AS_IT_COMES: partial(transformers_trainer, experts_implementation=STOCK),
}


def idle_and_waits(profile: Profile) -> tuple[float | None, float | None]:
    """Return the idle share of the GPU in the profiled steps, and host syncs per step."""
    assert profile.profiler is not None
    events = profile.profiler.key_averages()
    steps = [event for event in events if event.key.startswith("ProfilerStep") and event.device_type == DeviceType.CPU]
    if not torch.cuda.is_available():
        return None, None
    kernels = [each for each in events if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
    busy = sum(event.self_device_time_total for event in kernels)
    total = sum(event.cpu_time_total for event in steps)
    # The profiler syncs once when it stops.
    waits = max(0, sum(event.count for event in events if event.key in SYNCS) - 1)
    return max(0.0, 1 - busy / total), waits / STEPS


def time_variants(job: Job, rounds: int, rate: float) -> Iterator[list[dict[str, Any]]]:
    """Yield a row for each variant after each round; the first round is a warm-up."""
    clocks: dict[str, list[Clock]] = {name: [] for name in VARIANTS}
    failed: dict[str, str] = {}
    tokens, flops = job.sizes.batch * job.sizes.context, flops_of_step(job)
    model = job.model(use_toolkit_kernel())
    weights = sum(p.nbytes for p in model.parameters())
    del model
    profile, gpu_idle, host_waits = Profile(), None, None
    try:
        quietly(lambda: toolkit_trainer(job, profile))
        gpu_idle, host_waits = idle_and_waits(profile)
    except Exception as reason:  # throughput does not depend on it
        print(f"not profiled: {one_line(reason)}", file=sys.stderr)
    for turn in range(rounds + 1):
        for name, train in VARIANTS.items():
            if name in failed:
                continue
            try:
                clock = quietly(partial(train, job))
                if turn:
                    clocks[name].append(clock)
            except Exception as reason:  # a missing package or kernel, or out of memory
                failed[name] = one_line(reason)
        rows = []
        for name, each in clocks.items() if turn else ():
            gib: dict[str, float] = {"weights": weights, "gradients": weights, "AdamW": 2 * weights}
            found: dict[str, Any] = dict.fromkeys(("tokens per second", "ours is faster by", "MFU"))
            if each:
                step = statistics.median(clock.seconds for clock in each) / job.steps
                found |= {"tokens per second": round(tokens / step), "MFU": round(flops / step / rate, 3)}
                gib["activations"] = max(0, statistics.median(clock.peak for clock in each) - sum(gib.values()))
            ratios = [own.seconds / toolkit.seconds for own, toolkit in zip(each, clocks[OURS], strict=False)]
            if ratios:
                found["ours is faster by"] = round(statistics.median(ratios), 3)
            memory = ("weights", "gradients", "AdamW", "activations")
            rows.append(
                {
                    "contender": name,
                    **found,
                    **{f"{part}, GiB": round(gib[part] / 2**30, 2) if each else None for part in memory},
                    "GPU idle": gpu_idle if name == OURS else None,
                    "host waits per step": host_waits if name == OURS else None,
                    "failed": failed.get(name),
                }
            )
        if rows:
            yield rows


def flops_of_step(job: Job) -> float:
    """Return the FLOPs of products and attention, in the forward and backward pass."""
    model: Any = job.model(use_toolkit_kernel())
    with FlopCounter() as counter, torch.no_grad():
        model(input_ids=next(batches(job))[0])
    return float(FORWARDS * counter.flops)


def check_losses(job: Job) -> None:
    """Raise RuntimeError if the losses of the variants differ."""
    ids, _ = next(batches(job))
    try:
        with torch.no_grad():
            found = [job.model(each)(input_ids=ids, labels=ids).loss for each in (use_toolkit_kernel(), CAST, STOCK)]
    except Exception as reason:  # the row of the variant has the error
        print(f"losses not compared: {one_line(reason)}", file=sys.stderr)
        return
    if not all(torch.allclose(each, found[0], rtol=1e-3) for each in found):
        raise RuntimeError(f"losses of the variants differ: {found}")


def quietly(run: Callable[[], Clock]) -> Clock:
    """Call `run()` without its output, after freeing cached memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds. Default: 3")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per variant and round. Default: 30")
    parser.add_argument("--warmup", type=int, default=10, help="warm-up steps. Default: 10")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on any device; writes nothing")
    arguments = parser.parse_args()
    # transformers' Trainer would use DataParallel with several GPUs.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    on_gpu = torch.cuda.is_available()
    if not arguments.rehearse and not on_gpu:
        raise SystemExit("error: no GPU is available. Use --rehearse for a test run on the CPU.")
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes = REHEARSAL if arguments.rehearse else REAL
    how: dict[str, Any] = {"tokenizer": "bytes", "block_size": sizes.context, "batch_size": sizes.batch}
    data = load_text(STDLIB, None, **how, on_main=lambda decide: decide())
    use_cast_experts()
    disable_progress_bar()
    job = Job(sizes=sizes, blocks=data.train, device=device, warmup=arguments.warmup, steps=arguments.steps)
    rate = matrix_rate(device, torch.bfloat16, [64] if arguments.rehearse else [4096, 8192, 16384])
    check_losses(job)
    for counted, rows in enumerate(time_variants(job, arguments.rounds, rate), 1):
        if not arguments.rehearse:  # after each round, for interrupted runs
            write_report("gpu_training", rows, teraflops_per_second=round(rate / 1e12, 1), rounds=counted)
    if arguments.rehearse:
        print(*rows, sep="\n")
        return 0
    reached = next(row["ours is faster by"] for row in rows if row["contender"] == TRAINER)
    if reached is not None and reached >= LEAST_TIMES_TRAINER:
        return 0
    print(f"{reached} times Trainer's tokens per second, target {LEAST_TIMES_TRAINER}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
