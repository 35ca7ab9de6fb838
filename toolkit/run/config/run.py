"""Settings shared by all recipes, and option groups. Docstrings of fields are the text of --help.

A recipe's `Config` inherits `RunConfig`: common fields are flat flags (`--lr`, `--batch-size`), option groups have a
prefix (`--optimizer.weight-decay`). `None` means off or automatic.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.errors import require
from toolkit.experts.options import Options
from toolkit.experts.parallel.parallel_options import DDPOptions, DenseOptions
from toolkit.run.config.callback_options import CheckpointOptions, EarlyStoppingOptions
from toolkit.run.config.optimizer_options import OptimizerOptions, ScheduleOptions


class RunConfig(DenseOptions):
    """Settings of a run that all recipes share; presets of the recipe set the values.

    A recipe's `Config` inherits them and adds its own; `check_together` checks relations between fields.

    Raises:
        UserError: For invalid settings or combinations, with the field, its value and the remedy.
    """

    preset: ClassVar[str] = ""
    """The name of the preset on the command line: for W&B, and no setting."""

    epochs: PositiveInt = 1
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps, if --epochs takes longer."""
    batch_size: PositiveInt = 64
    """Global batch: samples per optimizer step, over all processes."""
    auto_batch_size: bool = False
    """Before training, double --batch-size in trial runs while two steps fit into memory."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step and process; more of them after a step ran out of memory."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    scale_lr: PositiveInt | None = None
    """Reference batch size for linear learning-rate scaling; a higher rate needs a warm-up. None: no scaling."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of weights, data order and all random draws."""
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Autocast dtype; none: that of `accelerate launch`, else no."""
    cpu: bool = False
    """Train on the CPU even if there is a GPU."""
    num_processes: PositiveInt | None = None
    """Processes to start on this machine; none: those of the launcher."""
    process_timeout: Annotated[float, Field(gt=0, le=525_600)] = 10.0
    """Minutes that a process waits for the others before all end with an error."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """At a gradient that is not finite, stop, or skip the step, up to twice in a row."""
    step_timeout: PositiveFloat | None = None
    """Seconds from a step to the next after which a run ends as hung; none: 20 median steps, at least two minutes."""
    max_restarts: NonNegativeInt = 0
    """Start all processes again, from the newest checkpoint, up to this many times after a crash."""
    profile: bool = False
    """Profile five steps after the first ten: a trace, and a table of the longest operations."""
    num_workers: NonNegativeInt = 0
    """Worker processes that load batches; 0 loads in the training process."""
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
    resume_from: PositiveInt | None = None
    """Step of the checkpoint to go back to; later ones are put aside. None: the newest."""
    extend: bool = False
    """Continue a run, finished or not, up to a larger --epochs or --max-steps."""
    tracker: Literal["none", "wandb", "tensorboard", "all"] = "wandb"
    """Log metrics there, too."""
    project: str | None = None
    """W&B project. Default: $WANDB_PROJECT, else the recipe's name."""
    run_name: str | None = None
    """Name of the run in W&B. Default: $WANDB_NAME, else recipe, preset and run directory."""
    log_every: PositiveInt = 50
    """Optimizer steps between log steps."""
    validation: bool = False
    """Hold out a part of the training data, too, and evaluate on it: for choices, which the test data must not make.
    Early stopping and a best checkpoint by validation/... do so by themselves."""
    eval_every: PositiveFloat = 1
    """Epochs between evaluations, also a fraction of one; the end of the run is always evaluated. The steps of a run on
    data of unknown length are one epoch."""
    sync_bn: bool = False
    """On several GPUs, take batch norm's mean and variance over the batch of all, with torch's SyncBatchNorm."""
    optimizer: OptimizerOptions = OptimizerOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    ddp: DDPOptions = DDPOptions()
    early_stopping: EarlyStoppingOptions = EarlyStoppingOptions()

    def check_together(self) -> None:
        super().check_together()
        warms_up = self.schedule.warmup_steps > 0 or self.schedule.warmup_epochs > 0
        remedy = f"a learning rate raised to {self.peak_lr:g} needs a warm-up: add schedule.warmup_epochs=2"
        require(self.peak_lr <= self.lr or warms_up, "scale_lr", self.scale_lr, remedy)
        remedy = "leave storage out, which has later checkpoints"
        require(self.resume_from is None or self.storage is None, "resume_from", self.resume_from, remedy)
        world, accumulation = self.num_processes or 1, self.gradient_accumulation_steps
        require_divisible(self.batch_size, world, accumulation, world * accumulation)

    @property
    def names(self) -> dict[str, str | None]:
        """W&B's project and run name, from the flags, else from W&B's environment variables."""
        return {
            "project": self.project or os.environ.get("WANDB_PROJECT"),
            "run_name": self.run_name or os.environ.get("WANDB_NAME"),
        }

    @property
    def validates(self) -> bool:
        """Return whether a part of the training data is held out for model selection."""
        by_best = (self.checkpoint.best or "").startswith("validation/")
        return self.validation or by_best or self.early_stopping.patience is not None

    @property
    def peak_lr(self) -> float:
        """Peak learning rate; with `scale_lr`, proportional to the batch size (Goyal et al. 2017, section 2.1)."""
        return self.lr if self.scale_lr is None else self.lr * self.batch_size / self.scale_lr


def require_divisible(batch_size: int, processes: int, accumulation: int, pieces: int) -> None:
    """Raise UserError unless the global batch divides into `pieces` equal micro-batches."""
    require(
        batch_size % pieces == 0,
        "batch_size",
        batch_size,
        f"it must divide by {processes} process(es) times {accumulation} accumulation step(s): use "
        f"{max(1, batch_size // pieces) * pieces}",
    )


def to_dict(config: Options) -> dict[str, Any]:
    """Return a config as JSON values that can be read back as flags, with one nested object per option group."""
    return config.model_dump(mode="json")
