"""Waits of the host for a device, as the emulated device and a GPU note them in tests, and their process groups."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("transformers", "accelerate", "peft")


class HostWait(NamedTuple):
    """The host waited for the device."""

    operation: str
    place: str
    """File of the innermost call within the toolkit or a library other than torch, or empty."""


def innermost_place() -> str:
    """Return the `place` of a current wait."""
    places = [place for frame in traceback.extract_stack() if (place := _place(frame.filename))]
    return places[-1] if places else ""


def _place(file: str) -> str:
    """Return `file` relative to its package's parent, for the toolkit and `LIBRARIES`; else empty."""
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
    again = dist.PrefixStore(backend, store)
    dist.init_process_group(backend, store=again, rank=rank, world_size=world)
