"""A GPU for tests, with the interface of the emulated device: `with device:` notes what makes the host wait for it.

    def on_the_device() -> None:              # in a process of its own
        device = use_gpu()
        with device:
            model.to(device.device)
            ...
        assert device.waits == []

All processes of `run_distributed` take the first GPU, so that several of them work on a machine with one: NCCL refuses
that, and gloo computes what it exchanges on the CPU. A process by itself has NCCL.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import free_port
from tests.host_waits import HostWait, innermost_place, restart_process_group


class Gpu:
    """The first GPU. While it is entered, `waits` gets what makes the host wait for it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.waits: list[HostWait] = []
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> Gpu:
        self._warnings.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(None, None, None)

    def _note(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.waits.append(HostWait(str(message), innermost_place()))


def use_gpu() -> Gpu:
    """The first GPU, which Accelerate takes from now on. For a process of its own, once."""
    # Each process counts as a machine of its own: on one machine Accelerate would give each another GPU.
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", ACCELERATE_USE_CPU="false")
    torch.cuda.set_device(0)
    if dist.is_initialized():
        restart_process_group("cpu:gloo,cuda:gloo")
    else:
        address = f"tcp://127.0.0.1:{free_port()}"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1)
    return Gpu()
