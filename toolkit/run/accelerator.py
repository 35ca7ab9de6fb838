"""The Accelerator of a run."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import (
    DDPCommunicationHookType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
    patch_environment,
)

from toolkit.errors import UserError, one_line, require
from toolkit.experts.parallel.nodes import launched_world
from toolkit.integrations.accelerate.compat import reset_accelerator_state
from toolkit.integrations.accelerate.prepare import check_accelerator
from toolkit.run.config.run import RunConfig
from toolkit.run.launch.restarts import LAUNCH
from toolkit.run.launch.world import is_set

_meetings = itertools.count()
"""Counter of rendezvous files: each new process group needs a new file."""


def build_accelerator(config: RunConfig) -> Accelerator:
    """Build the Accelerator from `config`.

    Raises:
        UserError: For fp16 on a CPU, a sharding that experts do not support, and if the rendezvous takes longer than
            `process_timeout`.
    """
    reset_accelerator_state()
    plugin = _fsdp2() if config.dense_parallel == "fsdp2" else None
    try:
        with patch_environment(ACCELERATE_USE_FSDP="false"):  # which Accelerate sets for later runs
            accelerator = Accelerator(
                cpu=config.cpu,
                mixed_precision=config.mixed_precision,
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=config.gradient_accumulation_steps,
                    sync_with_dataloader=False,
                    sync_each_batch=plugin is not None,  # or each rank would keep the gradients of all parameters
                ),
                fsdp_plugin=plugin,
                parallelism_config=_sets_of_shards(config),
                kwargs_handlers=[
                    InitProcessGroupKwargs(
                        init_method=_init_method(config), timeout=timedelta(minutes=config.process_timeout)
                    ),
                    DistributedDataParallelKwargs(
                        **config.ddp.model_dump() | {"comm_hook": DDPCommunicationHookType(config.ddp.comm_hook)}
                    ),
                ],
            )
    except UserError:
        raise
    except (RuntimeError, ValueError) as error:  # of torch's rendezvous, and of Accelerate's environment variables
        raise UserError(
            f"launch: the processes did not start together ({one_line(error)}). Start all ranks with the same "
            "MASTER_ADDR and MASTER_PORT, unset variables of other launches, or raise process_timeout."
        ) from error
    # Here Accelerate silently trains in float32.
    require(
        accelerator.mixed_precision != "fp16" or accelerator.device.type != "cpu",
        "mixed_precision",
        "fp16",
        "a CPU has no fp16 training: use bf16 or no",
    )
    check_accelerator(accelerator)
    return accelerator


def _fsdp2() -> FullyShardedDataParallelPlugin:
    """Return the plugin of the launch, by default one that shards the blocks of a model one at a time."""
    if is_set("ACCELERATE_USE_FSDP"):
        return FullyShardedDataParallelPlugin()
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")


def _sets_of_shards(config: RunConfig) -> ParallelismConfig | None:
    """Return the size and number of sets of shards, None for one set."""
    world, size = launched_world() or 1, config.fsdp_size
    if size is None or size == world:
        return None
    require(world % size == 0, "fsdp_size", size, f"it does not divide the {world} process(es) of this launch")
    return ParallelismConfig(dp_replicate_size=world // size, dp_shard_size=size)


def _init_method(config: RunConfig) -> str | None:
    """Return the rendezvous file of ranks on one machine. Torch's TCP server would listen on all interfaces."""
    if (launch := os.environ.get(LAUNCH)) is None:
        return None
    file = f"file://{launch}/store-{next(_meetings)}"
    if config.cpu or is_set("ACCELERATE_USE_CPU"):  # Accelerate then passes rank and world size
        return file
    return f"{file}?rank={os.environ['RANK']}&world_size={os.environ['WORLD_SIZE']}"
