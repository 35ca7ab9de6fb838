"""The settings that every recipe shares: frozen, typed, validated when they are made.

A recipe's own `Config` inherits `RunConfig`, so the flags that people type are flat (`--lr`, `--batch-size`); what is
rarely touched sits in nested groups (`--optimizer.weight-decay`). `None` means off or automatic, never -1 or 0.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import UserError


def require(holds: bool, name: str, value: object, remedy: str) -> None:
    """Raise UserError naming a field, its value and the remedy, unless `holds`."""
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} {value}: {remedy}.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW."""

    beta1: float = 0.9
    """Decay of the running mean of gradients, per step."""
    beta2: float = 0.999
    """Decay of the running mean of squared gradients, per step."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices, as a fraction of the learning rate per step; vectors have none."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global 2-norm; None leaves them."""

    def __post_init__(self) -> None:
        require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "take a number from 0 up to, not including, 1")
        require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "take a number from 0 up to, not including, 1")
        require(0 < self.eps < math.inf, "optimizer.eps", self.eps, "take a positive number")
        require(0 <= self.weight_decay < math.inf, "optimizer.weight_decay", self.weight_decay, "take zero or more")
        norm, remedy = self.max_grad_norm, "take a positive number, or none for no clipping"
        require(norm is None or 0 < norm < math.inf, "optimizer.max_grad_norm", norm, remedy)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves over a run."""

    name: Literal["constant", "cosine", "stable_decay"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    warmup_epochs: float = 0.0
    """The same in passes over the training data, instead of steps."""
    final: float = 0.0
    """Last learning rate, as a fraction of the highest."""
    decay_steps: int | None = None
    """Optimizer steps of the final descent of `stable_decay`; None means a fifth of the run."""

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "take zero or more steps")
        epochs, remedy = self.warmup_epochs, "take zero or more, and none where --schedule.warmup-steps says how many"
        fits = epochs == 0 or (0 < epochs < math.inf and self.warmup_steps == 0)
        require(fits, "schedule.warmup_epochs", epochs, remedy)
        require(0 <= self.final <= 1, "schedule.final", self.final, "take a fraction between 0 and 1")
        decay = self.decay_steps
        require(decay is None or decay > 0, "schedule.decay_steps", decay, "take one step or more")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how many to keep."""

    every_steps: int | None = None
    """Save every so many steps; None saves at the end of each epoch."""
    keep: int = 2
    """How many verified checkpoints to keep."""

    def __post_init__(self) -> None:
        every = self.every_steps
        require(every is None or every > 0, "checkpoint.every_steps", every, "take one step or more")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "keep at least one")


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """When to end a run that no longer gets better, judged by its evaluations."""

    patience: int | None = None
    """Evaluations in a row that may be no better than the best; None trains to the end."""
    metric: str = "loss"
    """What is compared: a name that evaluations report, such as loss or accuracy."""
    min_delta: float = 0.0
    """Less than this is no gain."""

    def __post_init__(self) -> None:
        patience = self.patience
        require(patience is None or patience >= 1, "early_stopping.patience", patience, "take one or more, or none")
        require(0 <= self.min_delta < math.inf, "early_stopping.min_delta", self.min_delta, "take zero or more")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Fields of every recipe. Each recipe's presets set the numbers."""

    epochs: int = 1
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps; None means by epochs alone."""
    batch_size: int = 64
    """Samples per optimizer step, over all processes and accumulation steps."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step on each process."""
    auto_batch_size: bool = False
    """Cut --batch-size into as few micro-batches as fit into memory, whatever --gradient-accumulation-steps says."""
    memory_fraction: float = 0.9
    """Part of the device's memory, or of the machine's on a CPU, that --auto-batch-size may fill."""
    lr: float = 1e-3
    """Highest learning rate, before --scale-lr."""
    scale_lr: int | None = None
    """The batch size that --lr is meant for: another batch gets a rate as many times as high, and needs a warm-up."""
    seed: int = 0
    """Fixes initial weights, the order of the data, and every random draw."""
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Type of matrix products; None takes what `accelerate launch` was told, else no."""
    cpu: bool = False
    """Stay on the CPU even where there is a GPU."""
    num_processes: int | None = None
    """Start this many processes on this machine; None runs in this one, or in those the launcher started."""
    num_workers: int = 0
    """Processes that fetch batches ahead; 0 fetches in line, which a memory-mapped table seldom needs to better."""
    dense_parallel: Literal["ddp", "fsdp2"] = "ddp"
    """Over several processes: copy all parameters but the experts' (DDP), or cut them into pieces (FSDP2)."""
    compile: bool = False
    """Compile the model with torch.compile; takes a while to start."""
    dataset: str = "auto"
    """Which data to train on; see the recipe."""
    data_dir: Path | None = None
    """Folder that holds data sets, or one; None takes $TOOLKIT_DATA_DIR, then the Hub."""
    run_dir: Path | None = None
    """Folder of this run; None makes runs/<recipe>/<time>."""
    resume: Literal["auto", "yes", "no"] = "auto"
    """auto: continue what --run-dir holds, else begin; yes (or bare --resume): there must be something to continue; no:
    refuse a used folder."""
    tracker: Literal["none", "wandb", "tensorboard", "all"] = "wandb"
    """Where metrics go besides metrics.jsonl. W&B is online with a key, offline without; it never asks."""
    log_every: int = 50
    """Optimizer steps between lines of metrics."""
    eval_every: int = 1
    """Epochs between evaluations; the end of the run is always evaluated."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)

    def __post_init__(self) -> None:
        for name in ("epochs", "eval_every", "batch_size", "gradient_accumulation_steps", "log_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "take one or more")
        for name in ("max_steps", "num_processes"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "take one or more")
        require(0 < self.lr < math.inf, "lr", self.lr, "take a positive number")
        require(self.scale_lr is None or self.scale_lr >= 1, "scale_lr", self.scale_lr, "take a batch size, or none")
        warms_up = self.schedule.warmup_steps > 0 or self.schedule.warmup_epochs > 0
        remedy = f"a learning rate raised to {self.peak_lr:g} needs a warm-up: add --schedule.warmup-epochs 2"
        require(self.peak_lr <= self.lr or warms_up, "scale_lr", self.scale_lr, remedy)
        require(0 <= self.seed < 2**32, "seed", self.seed, "take zero or more, below 2**32")
        require(self.num_workers >= 0, "num_workers", self.num_workers, "take zero or more")
        fraction, remedy = self.memory_fraction, "take a fraction above 0, up to 1"
        require(0 < fraction <= 1, "memory_fraction", fraction, remedy)
        pieces = (self.num_processes or 1) * self.gradient_accumulation_steps
        require_divisible(self.batch_size, self.num_processes or 1, self.gradient_accumulation_steps, pieces)

    @property
    def peak_lr(self) -> float:
        """The highest learning rate: with `scale_lr`, proportional to the batch (Goyal et al. 2017, section 2.1)."""
        return self.lr if self.scale_lr is None else self.lr * self.batch_size / self.scale_lr


def require_divisible(batch_size: int, processes: int, accumulation: int, pieces: int) -> None:
    """Raise UserError unless a global batch can be cut into `pieces` equal micro-batches."""
    require(
        batch_size % pieces == 0,
        "batch_size",
        batch_size,
        f"it must divide by {processes} process(es) times {accumulation} accumulation step(s): use "
        f"{max(1, batch_size // pieces) * pieces}",
    )


NOT_OF_THE_TRAJECTORY = frozenset(
    {
        "run_dir",
        "resume",
        "tracker",
        "num_workers",
        "num_processes",
        "memory_fraction",
        "cpu",
        "log_every",
        "checkpoint",
        "data_dir",
        "compile",
        "dense_parallel",
        "parallel_strategy",
        "ep_size",
        "recompute",
        "planner",
        "replan_every",
        "spare_slots",
        "initial_placement",
        "guard",
        "link_gbytes_per_second",
        "expert_time_share",
        "record_traces",
    }
)
"""Fields that may differ between a run and its continuation, because they do not decide what is learned."""


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))
