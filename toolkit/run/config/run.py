"""The settings of every recipe: frozen dataclasses, validated when they are made. Fields' docstrings are the --help.

A recipe's `Config` inherits `RunConfig`: common fields are flat flags (`--lr`, `--batch-size`), others are in nested
groups (`--optimizer.weight-decay`). `None` means off or automatic. The heading of a class's flags in --help is its
`help_heading`, or else the first paragraph of its docstring.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from toolkit.errors import UserError
from toolkit.run.config.choices import require_choices

MOST_MINUTES = 366 * 24 * 60
"""Of a time limit, a year: what counts down to it has no room for any number."""
MOST_WORKERS = 256
"""That a process may start to load batches: a number that was mistyped would fill the machine with processes."""


def require(holds: bool, name: str, value: object, remedy: str) -> None:
    """Raise UserError with the field, its value and the remedy, unless `holds`."""
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} {value}: {remedy}.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer: AdamW, with gradient clipping.

    The `optimizer` of a `RunConfig`. Raises UserError for a value that cannot be.
    """

    beta1: float = 0.9
    """EMA decay of gradients."""
    beta2: float = 0.999
    """EMA decay of squared gradients."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices, times the learning rate; vectors have none."""
    max_grad_norm: float | None = 1.0
    """Clip gradients to this global 2-norm; none: no clipping."""

    def __post_init__(self) -> None:
        require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "take a number from 0 up to, not including, 1")
        require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "take a number from 0 up to, not including, 1")
        require(0 < self.eps < math.inf, "optimizer.eps", self.eps, "take a positive number")
        require(0 <= self.weight_decay < math.inf, "optimizer.weight_decay", self.weight_decay, "take zero or more")
        norm, remedy = self.max_grad_norm, "take a positive number, or none for no clipping"
        require(norm is None or 0 < norm < math.inf, "optimizer.max_grad_norm", norm, remedy)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate schedule.

    The `schedule` of a `RunConfig`. Raises UserError for a value that cannot be.
    """

    name: Literal["constant", "cosine", "stable_decay"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up, instead of --schedule.warmup-steps."""
    final: float = 0.0
    """Final learning rate, as a fraction of the peak."""
    decay_steps: int | None = None
    """Optimizer steps of the decay of stable_decay; none: a fifth of the run."""

    def __post_init__(self) -> None:
        require_choices(self, "schedule.")
        require(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "take zero or more steps")
        epochs, remedy = self.warmup_epochs, "take zero or more, and none where --schedule.warmup-steps says how many"
        fits = epochs == 0 or (0 < epochs < math.inf and self.warmup_steps == 0)
        require(fits, "schedule.warmup_epochs", epochs, remedy)
        require(0 <= self.final <= 1, "schedule.final", self.final, "take a fraction between 0 and 1")
        decay = self.decay_steps
        require(decay is None or decay > 0, "schedule.decay_steps", decay, "take one step or more")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints.

    The `checkpoint` of a `RunConfig`: when they are written, and how many are kept. Raises UserError for a value that
    cannot be.
    """

    every_steps: int | None = None
    """Optimizer steps between checkpoints; none: one per epoch."""
    keep: int = 2
    """Number of verified checkpoints to keep."""
    in_background: bool = False
    """Write checkpoints while training goes on; takes the memory of one more model with its optimizer states."""

    def __post_init__(self) -> None:
        every = self.every_steps
        require(every is None or every > 0, "checkpoint.every_steps", every, "take one step or more")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "keep at least one")


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """DDP, on several processes."""

    find_unused_parameters: bool = False
    """Look for parameters without a gradient in each step; for models that do not use all of them."""
    static_graph: bool = False
    """The same parameters are used in every step."""
    bucket_cap_mb: int = 25
    """Size of a bucket of gradients that is averaged at once, in MiB."""
    gradient_as_bucket_view: bool = False
    """Keep gradients in the buckets, which saves their memory once."""
    broadcast_buffers: bool = True
    """Copy buffers, such as running means, from the first process before each forward pass."""
    comm_hook: Literal["no", "fp16", "bf16"] = "no"
    """Type in which gradients travel."""

    def __post_init__(self) -> None:
        require_choices(self, "ddp.")
        require(self.bucket_cap_mb >= 1, "ddp.bucket_cap_mb", self.bucket_cap_mb, "take one MiB or more")
        both = self.find_unused_parameters and self.static_graph
        require(not both, "ddp.static_graph", True, "leave --ddp.find-unused-parameters out: it finds them by itself")


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """Early stopping, by evaluations.

    The `early_stopping` of a `RunConfig`. Raises UserError for a value that cannot be.
    """

    patience: int | None = None
    """Stop after this many evaluations without improvement; none: never."""
    metric: str = "loss"
    """Metric of the evaluations to compare, such as loss or accuracy."""
    min_delta: float = 0.0
    """Minimum change that is an improvement."""

    def __post_init__(self) -> None:
        patience = self.patience
        require(patience is None or patience >= 1, "early_stopping.patience", patience, "take one or more, or none")
        require(0 <= self.min_delta < math.inf, "early_stopping.min_delta", self.min_delta, "take zero or more")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run that every recipe has; each recipe's presets set the numbers.

    A recipe's `Config` inherits them and adds its own. Raises UserError, with the flag, its value and the remedy, for
    settings that cannot be, alone or together.
    """

    help_heading: ClassVar[str] = "Training"
    """Above the fields of this class in --help; a class without one has the first paragraph of its docstring there."""

    preset: ClassVar[str] = ""
    """The name of the preset on the command line: for W&B, and no setting."""

    epochs: int = 1
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, if --epochs takes longer."""
    batch_size: int = 64
    """Global batch: samples per optimizer step, over all processes."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step and process."""
    auto_batch_size: bool = False
    """Find the fewest accumulation steps that fit into memory, instead of --gradient-accumulation-steps."""
    memory_fraction: float = 0.9
    """Fraction of the device's memory (on a CPU, the machine's) that --auto-batch-size may use."""
    lr: float = 1e-3
    """Peak learning rate."""
    scale_lr: int | None = None
    """Reference batch size for linear learning-rate scaling; a higher rate needs a warm-up. None: no scaling."""
    seed: int = 0
    """Seed of weights, data order and all random draws."""
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Autocast dtype; none: that of `accelerate launch`, else no."""
    cpu: bool = False
    """Train on the CPU even if there is a GPU."""
    num_processes: int | None = None
    """Processes to start on this machine; none: those of the launcher."""
    process_timeout: float = 10.0
    """Minutes that a process waits for the others before all end with an error."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """At a gradient that is not finite, stop, or skip the step, up to twice in a row."""
    step_timeout: float | None = None
    """Seconds after which a step counts as hung and the run ends; none: 20 median steps, at least two minutes."""
    max_restarts: int = 0
    """Start all processes again, from the newest checkpoint, up to this many times after a crash."""
    profile: bool = False
    """Profile five steps after the first ten: a trace, and a verdict of five lines."""
    peak_flops: float | None = None
    """Dense FLOPs per second of a device, for perf/mfu; none: those of common GPUs in bf16."""
    num_workers: int = 0
    """Worker processes that load batches; 0 loads in the training process."""
    dense_parallel: Literal["ddp", "fsdp2"] = "ddp"
    """On several processes, replicate (DDP) or shard (FSDP2) all parameters except the experts'."""
    fsdp_size: int | None = None
    """Neighbouring processes that share one set of shards with --dense-parallel fsdp2 (HSDP); none: all."""
    compile: bool = False
    """Compile the model with torch.compile, which takes a while at the start."""
    dataset: str = "auto"
    """Data set to train on; the recipe's guide lists them."""
    data_dir: Path | None = None
    """Folder of data sets, or of one; none: $TOOLKIT_DATA_DIR, then the Hub."""
    run_dir: Path | None = None
    """Folder of the run; none: runs/<recipe>/<time>."""
    storage: str | None = None
    """URI, such as s3://bucket/run, that the run is copied to and continued from on any machine."""
    resume: Literal["auto", "yes", "no"] = "auto"
    """Resume the run in --run-dir: if there is one (auto), always (yes, or --resume alone), or never (no)."""
    resume_from: int | None = None
    """Step of the checkpoint to go back to; later ones are put aside. None: the newest."""
    extend: bool = False
    """Continue a run, finished or not, up to a larger --epochs or --max-steps."""
    tracker: Literal["none", "wandb", "tensorboard", "trackio", "all"] = "wandb"
    """Log metrics there, too"""
    log_every: int = 50
    """Optimizer steps between lines of metrics."""
    eval_every: int = 1
    """Epochs between evaluations; the end of the run is always evaluated."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)

    def __post_init__(self) -> None:
        require_choices(self)
        for name in ("epochs", "eval_every", "batch_size", "gradient_accumulation_steps", "log_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "take one or more")
        for name in ("max_steps", "num_processes"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "take one or more")
        shares, world = self.fsdp_size, self.num_processes
        if shares is not None:
            require(shares >= 2, "fsdp_size", shares, "take two or more, or --dense-parallel ddp")
            fits = world is None or world == 1 or world % shares == 0
            require(fits, "fsdp_size", shares, f"it must divide --num-processes {world}")
        require(0 < self.lr < math.inf, "lr", self.lr, "take a positive number")
        require(self.scale_lr is None or self.scale_lr >= 1, "scale_lr", self.scale_lr, "take a batch size, or none")
        warms_up = self.schedule.warmup_steps > 0 or self.schedule.warmup_epochs > 0
        remedy = f"a learning rate raised to {self.peak_lr:g} needs a warm-up: add --schedule.warmup-epochs 2"
        require(self.peak_lr <= self.lr or warms_up, "scale_lr", self.scale_lr, remedy)
        require(0 <= self.seed < 2**32, "seed", self.seed, "take zero or more, below 2**32")
        back, begins = self.resume_from, self.resume == "no"
        require(
            back is None or (back >= 1 and not begins),
            "resume_from",
            back,
            "take the step of a checkpoint, and leave --resume no out",
        )
        remedy = "leave --storage out, which has later checkpoints"
        require(back is None or self.storage is None, "resume_from", back, remedy)
        require(not (self.extend and begins), "extend", self.extend, "leave --resume no out")
        limit = self.step_timeout
        remedy = f"take seconds above 0, up to {60 * MOST_MINUTES}, or none"
        require(limit is None or 0 < limit <= 60 * MOST_MINUTES, "step_timeout", limit, remedy)
        require(self.max_restarts >= 0, "max_restarts", self.max_restarts, "take zero or more")
        peak = self.peak_flops
        require(peak is None or 0 < peak < math.inf, "peak_flops", peak, "take FLOPs per second above 0, or none")
        fits = 0 <= self.num_workers <= MOST_WORKERS
        require(fits, "num_workers", self.num_workers, f"take zero to {MOST_WORKERS}")
        minutes, remedy = self.process_timeout, f"take minutes above 0, up to {MOST_MINUTES}"
        require(0 < minutes <= MOST_MINUTES, "process_timeout", minutes, remedy)
        fraction, remedy = self.memory_fraction, "take a fraction above 0, up to 1"
        require(0 < fraction <= 1, "memory_fraction", fraction, remedy)
        pieces = (self.num_processes or 1) * self.gradient_accumulation_steps
        require_divisible(self.batch_size, self.num_processes or 1, self.gradient_accumulation_steps, pieces)

    @property
    def peak_lr(self) -> float:
        """The peak learning rate: with `scale_lr`, proportional to the batch (Goyal et al. 2017, section 2.1)."""
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


def to_dict(config: Any) -> dict[str, Any]:
    """A config as JSON values that read back as flags: an enum by its name, infinity as "inf"."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, float) and not math.isfinite(value):  # which JSON lacks
            return str(value)
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))
