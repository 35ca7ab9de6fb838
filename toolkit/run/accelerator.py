"""The Accelerator of a run."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch.distributed import DistNetworkError

from toolkit.errors import UserError
from toolkit.integrations.accelerate.compat import reset_accelerator_state
from toolkit.integrations.accelerate.prepare import ddp_options
from toolkit.run.config.run import RunConfig
from toolkit.run.launch.children import holding_signals
from toolkit.run.launch.restarts import STORE
from toolkit.run.launch.world import is_set, meeting_within

_meetings = itertools.count()
"""A process group that is made after another one was destroyed needs a new file."""


def build_accelerator(config: RunConfig) -> Accelerator:
    """Returns what Accelerate is told of `config`. Raises UserError for what the device cannot do, and for a port that
    another program has."""
    reset_accelerator_state()
    try:
        # A signal would interrupt a connection to another process, which is tried for minutes.
        with meeting_within(config.process_timeout), holding_signals():
            accelerator = Accelerator(
                cpu=config.cpu,
                mixed_precision=config.mixed_precision,
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False
                ),
                kwargs_handlers=[
                    InitProcessGroupKwargs(
                        init_method=_init_method(config), timeout=timedelta(minutes=config.process_timeout)
                    ),
                    ddp_options(config.ddp),
                ],
            )
    except ValueError as error:
        reset_accelerator_state()
        if "mixed precision" not in str(error):
            raise
        raise UserError(
            field="mixed_precision", value=config.mixed_precision, remedy="this device cannot do it: use no"
        ) from error
    except DistNetworkError as error:
        reset_accelerator_state()
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(f"MASTER_PORT {port}: another program on this machine listens there: take another.") from error
    if accelerator.device.type == "mps":
        raise UserError(
            field="cpu", value=False, remedy="mps has no float64, in which samples are counted: use cpu=True"
        )
    # Accelerate trains on in float32 here, without a word.
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError(field="mixed_precision", value="fp16", remedy="a CPU has no fp16 training: use bf16 or no")
    if config.ddp.comm_hook == "bf16" and accelerator.device.type == "cpu":
        remedy = "a CPU cannot add bf16 gradients of several processes: use fp16 or no"
        raise UserError(field="ddp.comm_hook", value="bf16", remedy=remedy)
    return accelerator


def _init_method(config: RunConfig) -> str | None:
    """Returns where ranks of one machine meet: in a file, because torch's server listens to the whole network."""
    if (path := os.environ.get(STORE)) is None:
        return None
    path += f"-{next(_meetings)}"
    if config.cpu or is_set("ACCELERATE_USE_CPU"):  # then Accelerate says which rank this is
        return f"file://{path}"
    return f"file://{path}?rank={os.environ['RANK']}&world_size={os.environ['WORLD_SIZE']}"
