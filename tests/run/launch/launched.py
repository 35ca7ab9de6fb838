"""Environments of processes with and without a launcher."""

import os

from benchmarks.support.processes import ROOT

LAUNCHER_VARIABLES = ("ACCELERATE_", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_", "OMP_", "TOOLKIT_", "WANDB_", "FSDP_")
RANK_1_OF_2 = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
RANK_1_OF_2 |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process without launcher variables, and with `more`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    return clean | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | more
