"""The Accelerator of a run."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType, GradientAccumulationPlugin, InitProcessGroupKwargs
from torch.distributed import DistError

from toolkit.errors import UserError, one_line, require
from toolkit.integrations.accelerate.compat import reset_accelerator_state
from toolkit.run.config.run import RunConfig
from toolkit.run.launch.restarts import LAUNCH
from toolkit.run.launch.world import is_set

_meetings = itertools.count()
"""Counter of rendezvous files: each new process group needs a new file."""


def build_accelerator(config: RunConfig) -> Accelerator:
    """Build the Accelerator from `config`.

    Raises:
        UserError: For fp16 on a CPU, and if the rendezvous takes longer than `process_timeout`.
    """
    reset_accelerator_state()
    try:
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
                DistributedDataParallelKwargs(
                    **config.ddp.model_dump() | {"comm_hook": DDPCommunicationHookType(config.ddp.comm_hook)}
                ),
            ],
        )
    except DistError as error:
        raise UserError(
            f"launch: the ranks did not meet ({one_line(error)}). Start all {os.environ.get('WORLD_SIZE')} ranks "
            "with the same MASTER_ADDR and MASTER_PORT, or raise process_timeout."
        ) from error
    # Here Accelerate silently trains in float32.
    require(
        accelerator.mixed_precision != "fp16" or accelerator.device.type != "cpu",
        "mixed_precision",
        "fp16",
        "a CPU has no fp16 training: use bf16 or no",
    )
    return accelerator


def _init_method(config: RunConfig) -> str | None:
    """Return the rendezvous file of ranks on one machine. Torch's TCP server would listen on all interfaces."""
    if (launch := os.environ.get(LAUNCH)) is None:
        return None
    file = f"file://{launch}/store-{next(_meetings)}"
    if config.cpu or is_set("ACCELERATE_USE_CPU"):  # Accelerate then passes rank and world size
        return file
    return f"{file}?rank={os.environ['RANK']}&world_size={os.environ['WORLD_SIZE']}"
