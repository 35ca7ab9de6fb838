"""Which ranks are on which node, as the launcher says, and the ranks of an EP group on each."""

from __future__ import annotations

import os
from collections.abc import Sequence

from toolkit.errors import UserError

WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def ranks_per_node(default: int) -> int:
    """The number of processes that the launcher started on this node (LOCAL_WORLD_SIZE), or `default`.

    Several launchers on one machine emulate nodes.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE") or default)


def launched_world() -> int | None:
    """The number of processes that the launcher of this process started. None: there is no launcher."""
    for name in WORLD_SIZES:
        if value := os.environ.get(name):
            return int(value)
    return None


def rows_of_nodes(ep_ranks: Sequence[int], per_node: int) -> list[list[int]]:
    """The ranks of an EP group, a row for each node, with `per_node` consecutive ranks of the world on a node.

    Raises UserError where that is one node, or where nodes have unequal parts of the group.
    """
    nodes = sorted({rank // per_node for rank in ep_ranks})
    rows = [sorted(rank for rank in ep_ranks if rank // per_node == node) for node in nodes]
    of_group = f"exchange='hierarchical': the EP group of processes {', '.join(map(str, sorted(ep_ranks)))}"
    if len(rows) == 1:
        raise UserError(
            f"{of_group} is on one node, of {per_node} processes by LOCAL_WORLD_SIZE: use flat, or an ep_size of "
            "several nodes."
        )
    if len({len(row) for row in rows}) > 1:
        parts = ", ".join(str(len(row)) for row in rows)
        raise UserError(
            f"{of_group} has {parts} on its nodes: use flat, or an ep_size that is a multiple of the {per_node} "
            "processes of a node."
        )
    return rows
