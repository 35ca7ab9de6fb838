"""Checks of the world started by another launcher. Imports torch only to count GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from toolkit.errors import UserError, require
from toolkit.experts.parallel.nodes import launched_world, number_of_launcher, ranks_per_node
from toolkit.run.config.run import RunConfig
from toolkit.run.launch.restarts import LAUNCH, RESTARTED, past_restarts

OF_A_LAUNCHER = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_"),
    *("PMI_", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", LAUNCH, RESTARTED),
)
"""Prefixes of environment variables that make a process a rank of a world, or a restarted rank."""


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without launcher variables, for a program that is not a rank of this world."""
    return {name: value for name, value in environment.items() if not name.startswith(OF_A_LAUNCHER)}


def check_world(config: RunConfig) -> None:
    """Raise UserError unless the world size matches `config` and each process has its own device."""
    past_restarts()  # raises for wrong variables
    for plugin in ("DEEPSPEED", "MEGATRON_LM"):
        if is_set(f"ACCELERATE_USE_{plugin}"):
            raise UserError(
                f"launch: it asks for {plugin}, which would treat experts as replicated. "
                "Launch with MULTI_GPU, or with FSDP to shard all parameters."
            )
    world, asked = launched_world(), config.num_processes
    if world is None:
        return
    for name in ("RANK", "LOCAL_RANK"):
        number_of_launcher(name, most=world - 1)
    number_of_launcher("MASTER_PORT", most=65535)
    if "RANK" in os.environ and world > 1 and LAUNCH not in os.environ and "MASTER_ADDR" not in os.environ:
        raise UserError("MASTER_ADDR: is not set. Set the address of rank 0 on every rank, or use torchrun.")
    remedy = f"the launcher started {world}: leave it out, or make the two numbers equal"
    require(asked in (None, world), "num_processes", asked, remedy)
    remedy = "the launcher has to restart its processes: leave it out, and give torchrun its own --max-restarts"
    require(not config.max_restarts or LAUNCH in os.environ, "max_restarts", config.max_restarts, remedy)
    finds_run = not number_of_launcher("TORCHELASTIC_MAX_RESTARTS") or config.run_dir is not None
    require(finds_run, "run_dir", None, "the launcher may restart the processes: give one, so that they find their run")
    if world == 1 or config.cpu or is_set("ACCELERATE_USE_CPU"):
        return
    import torch

    devices, ranks = torch.accelerator.device_count(), ranks_per_node(world)
    if devices == 0:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # without it, Accelerate trains each process on its own
    elif "LOCAL_RANK" not in os.environ:
        raise UserError("LOCAL_RANK: is not set and WORLD_SIZE is, so each process would train by itself. Set both.")
    elif devices < ranks:
        raise UserError(
            f"this launch starts {ranks} processes, and this machine has only {devices} GPUs: start fewer, or "
            "add cpu=True."
        )


def is_set(name: str) -> bool:
    """Return whether the environment variable `name` is true."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
