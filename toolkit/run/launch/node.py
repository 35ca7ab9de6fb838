"""The node that a process runs on: how many ranks the launcher started there, and how many cores there are."""

from __future__ import annotations

import os


def ranks_per_node(default: int) -> int:
    """Processes that the launcher started on this node, from LOCAL_WORLD_SIZE; `default`, which is those of the world,
    where it does not say.

    Nodes are emulated on one machine by as many launchers: `torchrun --nnodes 2 --nproc-per-node 2` for each.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE") or default)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
