"""Process-wide settings that make training on a CPU faster. A CPU run uses them until it is closed.

with process_settings():      # in your own training loop
    train()
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_open = 0
"""Number of open uses of the allocator settings; the last one to end restores them."""


@contextmanager
def process_settings() -> Iterator[None]:
    """Flush subnormal numbers to zero and make glibc keep freed memory, inside the `with` block.

    - Optimizer moments of inactive units decay to subnormal numbers, below 1e-38, which make a CPU ten times slower.
      Flushing is a setting of the calling thread and is restored at the end.
    - By default glibc returns each large buffer to the kernel when it is freed, and the kernel zeroes and maps pages
      again in the next step: 75 instead of 54 ms per step for a layer of 64 experts. At the end, glibc's defaults or
      `MALLOC_MMAP_MAX_` and `MALLOC_TRIM_THRESHOLD_` are set, because glibc has no getter for the previous values, and
      free memory is returned. Does nothing with other C libraries.

    It can be nested, and used as a decorator.
    """
    global _open
    # numpy probes subnormals on first use, and before 2.4 warns if they are flushed to zero.
    for kind in (np.float32, np.float64):
        str(np.finfo(kind))
    flushed_before = flushes_subnormals()
    torch.set_flush_denormal(True)
    if not _open:
        _set_allocator(mmap_max=0, trim_threshold=2**31 - 1)
    _open += 1
    try:
        yield
    finally:
        _open -= 1
        if not _open:
            _restore_allocator()
        torch.set_flush_denormal(flushed_before)


def flushes_subnormals() -> bool:
    """Return whether this thread flushes subnormal numbers to zero."""
    return sys.float_info.min / 2 == 0


def _set_allocator(*, mmap_max: int, trim_threshold: int) -> bool:
    """Set the maximum number of buffers from mmap, and the free bytes to keep. Returns False without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    mallopt(_M_MMAP_MAX, mmap_max)
    mallopt(_M_TRIM_THRESHOLD, trim_threshold)
    return True


def _restore_allocator() -> None:
    mmap_max = int(os.environ.get("MALLOC_MMAP_MAX_", 65536))
    trim_threshold = int(os.environ.get("MALLOC_TRIM_THRESHOLD_", 128 * 1024))
    if _set_allocator(mmap_max=mmap_max, trim_threshold=trim_threshold):
        ctypes.CDLL(None).malloc_trim(0)
