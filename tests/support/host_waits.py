"""Host syncs and process groups of the emulated device and of GPUs in tests."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.support.processes import ROOT

LIBRARIES = ("transformers", "accelerate", "peft")


class HostWait(NamedTuple):
    """A wait of the host for the device."""

    operation: str
    place: str
    """File of the innermost call in the toolkit or `LIBRARIES`, or empty."""


def innermost_place() -> str:
    """Return the `place` of a current wait."""
    frame: FrameType | None = sys._getframe()
    while frame and not _place(frame.f_code.co_filename):
        frame = frame.f_back
    return _place(frame.f_code.co_filename) if frame else ""


@cache
def _place(file: str) -> str:
    """Return the path of `file` from its package on, for the toolkit and `LIBRARIES`; else empty."""
    path = Path(file)
    if path.is_relative_to(ROOT / "toolkit"):
        return str(path.relative_to(ROOT))
    parts = path.parts
    if "site-packages" not in parts:
        return ""
    inside = parts[parts.index("site-packages") + 1 :]
    return "/".join(inside) if inside[0] in LIBRARIES else ""


def restart_process_group(backend: str) -> None:
    """Restart the process group of `run_distributed`, with `backend`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, is_master=False)
    prefixed = dist.PrefixStore(backend, store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world)
