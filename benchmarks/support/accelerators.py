"""Accelerators of cases in one process, which differ in precision and sharding."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig, patch_environment


def make_accelerator(dense: str = "ddp", fsdp_size: int | None = None, **options: Any) -> Accelerator:
    """Make an Accelerator with FSDP2 if `dense` is "fsdp2", with sets of `fsdp_size` ranks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if dense == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        )
    with patch_environment(ACCELERATE_USE_FSDP="false"):  # which Accelerate sets for later cases
        if fsdp_size is not None:
            sets = dist.get_world_size() // fsdp_size
            options["parallelism_config"] = ParallelismConfig(dp_replicate_size=sets, dp_shard_size=fsdp_size)
        return Accelerator(**options)
