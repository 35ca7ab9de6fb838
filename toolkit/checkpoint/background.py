"""Checkpoints that are written by a thread while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.experts.parallel.groups import new_group

Write = Callable[[dist.ProcessGroup | None], Path | None]
"""Writes a checkpoint that was begun. A collective of the group, by default of all ranks."""


class HostBuffers:
    """Copies tensors to memory of the host, which is kept for the next copy; pinned for those of a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, key: str, tensor: Tensor) -> Tensor:
        """A copy, complete once `wait_for_device` was called."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def wait_for_device(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class BackgroundSave:
    """Writes one checkpoint at a time. Ranks meet in a process group of its own, so that training may use the other.

    `buffers` holds the tensors that are being written: the memory of one more model with its optimizer states.
    """

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self._thread: Thread | None = None
        self._folder: Path | None = None
        self._error: Exception | None = None
        self._group: dist.ProcessGroup | None = None

    def start(self, write: Write) -> None:
        """Write what was begun with `buffers`. A collective; the save before must have been waited for."""
        assert self._thread is None
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = new_group(backend="gloo")
        self.buffers.wait_for_device()
        # The interpreter does not wait for a daemon, whose peers may be gone.
        self._thread = Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Write) -> None:
        try:
            self._folder = write(self._group)
        except Exception as error:
            self._error = error

    def wait(self, seconds: float | None = None) -> Path | None:
        """The checkpoint's folder once it is written; None where it could not be, or nothing was begun, or it takes
        more than so many `seconds`. Raises what the thread raised."""
        if self._thread is None:
            return None
        self._thread.join(seconds)
        if self._thread.is_alive():
            return None
        folder, error = self._folder, self._error
        self._thread = self._folder = self._error = None
        if error is not None:
            raise error
        return folder
