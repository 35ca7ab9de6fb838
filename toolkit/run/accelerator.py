"""The Accelerator of a run."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, str_to_bool
from torch.distributed import DistNetworkError

from toolkit.compat import reset_accelerator_state
from toolkit.errors import UserError
from toolkit.experts.hosts.loop.accelerate_prepare import ddp_options
from toolkit.run.config.run import RunConfig
from toolkit.run.launch.children import holding_signals


def build_accelerator(config: RunConfig) -> Accelerator:
    """Returns what Accelerate is told of `config`. Raises UserError for what the device cannot do, for a variable of
    Accelerate that it cannot follow, and for a port that another program has."""
    reset_accelerator_state()
    _check_environment(config)
    try:
        with holding_signals():  # one would interrupt a connection to another process, which is tried for minutes
            accelerator = Accelerator(
                cpu=config.cpu,
                mixed_precision=config.mixed_precision,
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False
                ),
                kwargs_handlers=[
                    InitProcessGroupKwargs(timeout=timedelta(minutes=config.process_timeout)),
                    ddp_options(config.ddp),
                ],
            )
    except ValueError as error:
        reset_accelerator_state()
        if "mixed precision" not in str(error):
            raise
        raise UserError(f"--mixed-precision {config.mixed_precision}: this device cannot do it: use no.") from error
    except DistNetworkError as error:
        reset_accelerator_state()
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(f"MASTER_PORT {port}: another program on this machine listens there: take another.") from error
    # Accelerate trains on in float32 here, without a word.
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError("--mixed-precision fp16: a CPU has no fp16 training: use bf16 or no.")
    if config.ddp.comm_hook == "bf16" and accelerator.device.type == "cpu":
        raise UserError("--ddp.comm-hook bf16: a CPU cannot add bf16 gradients of several processes: use fp16 or no.")
    return accelerator


def _check_environment(config: RunConfig) -> None:
    """Raise UserError for a variable of Accelerate that would end in its traceback, here or when it moves a model."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "no")
    try:
        str_to_bool(on_cpu)
    except ValueError:
        raise UserError(f"ACCELERATE_USE_CPU={on_cpu}: is neither true nor false: take one, or unset it.") from None
    here = torch.accelerator.current_accelerator(check_available=True)
    device = os.environ.get("ACCELERATE_TORCH_DEVICE", "cpu")
    if device.partition(":")[0] not in ("cpu", here.type if here is not None else "cpu"):
        raise UserError(f"ACCELERATE_TORCH_DEVICE={device}: there is no such device here: unset it.")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if config.mixed_precision is None and precision.lower() not in ("no", "fp16", "bf16"):
        remedy = "give --mixed-precision no, fp16 or bf16"
        raise UserError(f"ACCELERATE_MIXED_PRECISION={precision}: a run has no such precision: {remedy}.")
