"""The Accelerator of a run."""

from __future__ import annotations

import os
from datetime import timedelta

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch.distributed import DistNetworkError

from toolkit.compat import reset_accelerator_state
from toolkit.config.run import RunConfig
from toolkit.errors import UserError
from toolkit.parallel.prepare import ddp_options


def build_accelerator(config: RunConfig) -> Accelerator:
    """What Accelerate is told of `config`. Raises UserError for what the device cannot do, and for a port that another
    program has."""
    reset_accelerator_state()
    try:
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
