"""A GPU for tests with the interface of the emulated device: `with device:` records host syncs.

    def on_the_device() -> None:              # in a separate process
        device = use_gpu()
        with device:
            model.to(device.device)
            ...
        assert device.waits == []

With a GPU for each process of `run_distributed`, the backend is NCCL. With fewer GPUs, all processes share the first
GPU and the backend is gloo, because NCCL does not support shared GPUs. gloo runs most collectives of GPU tensors on the
CPU, `stage_sends` stages sends there, and there is no reduce-scatter, which FSDP2 needs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.processes import free_port
from tests.support.host_waits import HostWait, innermost_place, restart_process_group


class Gpu:
    """A GPU. While it is entered, `waits` collects host syncs.

    Exception: torch's grouped products read the slots' ends if there is no kernel (`has_grouped_kernel`).
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
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
        place = innermost_place()
        if "synchronizing CUDA operation" in str(message) and place != "toolkit/experts/layer/grouped_mm.py":
            self.waits.append(HostWait(str(message), place))


def has_grouped_kernel() -> bool:
    """Return whether torch has a bfloat16 kernel for grouped products on this GPU (Hopper, data-center Blackwell)."""
    return torch.cuda.get_device_capability()[0] in (9, 10)


def skip_without_gpus(count: int) -> None:
    """Skip the current test on machines with fewer GPUs."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def use_gpu() -> Gpu:
    """Make Accelerate use a GPU. Call it once in a separate process."""
    os.environ["ACCELERATE_USE_CPU"] = "false"
    if not dist.is_initialized():
        torch.cuda.set_device(0)
        address = f"tcp://127.0.0.1:{free_port()}"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1)
    elif torch.cuda.device_count() >= dist.get_world_size():
        torch.cuda.set_device(dist.get_rank())
        restart_process_group("cpu:gloo,cuda:nccl")
    else:
        # As if each process had its own machine: on one machine, Accelerate assigns different GPUs.
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        torch.cuda.set_device(0)
        restart_process_group("cpu:gloo,cuda:gloo")
        stage_sends()
    return Gpu(torch.cuda.current_device())


class Staged:
    """Pending send or receive of a CPU copy of `tensor`."""

    def __init__(self, work: dist.Work, copy: torch.Tensor, tensor: torch.Tensor):
        self.work, self.copy, self.tensor = work, copy, tensor

    def wait(self, *timeout: Any) -> None:
        self.work.wait(*timeout)
        if self.copy is not self.tensor:  # a receive in place has no new version
            self.tensor.copy_(self.copy)


def stage_sends() -> None:
    """Support sends and receives of GPU tensors with gloo."""
    send, receive, batch = dist.send, dist.recv, dist.batch_isend_irecv

    def staged_batch(operations: list[dist.P2POp]) -> list[Any]:
        copies = [operation.tensor.cpu() for operation in operations]
        on_cpu = [
            dist.P2POp(operation.op, copy, group=operation.group, group_peer=operation.group_peer)
            for operation, copy in zip(operations, copies, strict=True)
        ]
        works = zip(batch(on_cpu), copies, operations, strict=True)
        return [Staged(work, copy, operation.tensor) for work, copy, operation in works]

    def staged(one: Callable[..., Any]) -> Callable[..., None]:
        def call(tensor: torch.Tensor, **options: Any) -> None:
            copy = tensor.cpu()
            one(copy, **options)
            tensor.copy_(copy)

        return call

    dist.send, dist.recv, dist.batch_isend_irecv = staged(send), staged(receive), staged_batch
