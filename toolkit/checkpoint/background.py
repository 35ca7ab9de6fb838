"""Asynchronous checkpoints, written by a thread during training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.experts.parallel.groups import new_group

Write = Callable[[dist.ProcessGroup | None], Path | None]
"""Writes a checkpoint and returns its path. A collective of the group, by default of all ranks."""


class HostBuffers:
    """Reusable host buffers for copies of tensors; pinned memory for GPU tensors."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, key: str, tensor: Tensor) -> Tensor:
        """Return a copy, which is complete after `wait_for_device`."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def wait_for_device(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class BackgroundSave:
    """Writer of one checkpoint at a time, with its own process group so that training can use the default one.

    `buffers` holds the tensors in progress: the size of the model and its optimizer states.
    """

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self._saved: Future[Path | None] | None = None
        self._group: dist.ProcessGroup | None = None

    def start(self, write: Write) -> None:
        """Write the checkpoint in `buffers` in a thread. A collective; call `wait` for the previous one first."""
        assert self._saved is None
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = new_group(backend="gloo")
        self.buffers.wait_for_device()
        self._saved = saved = Future[Path | None]()

        def run() -> None:
            try:
                saved.set_result(write(self._group))
            except Exception as error:
                saved.set_exception(error)

        # A daemon, because the interpreter must not wait for a thread whose peers can be gone.
        Thread(target=run, name="checkpoint", daemon=True).start()

    def wait(self, seconds: float | None = None) -> Path | None:
        """Wait for the checkpoint and return its path; None if writing failed, none is in progress, or `seconds` pass.

        Raises errors of the thread."""
        if self._saved is None or futures.wait([self._saved], seconds).not_done:
            return None
        saved, self._saved = self._saved, None
        return saved.result()
