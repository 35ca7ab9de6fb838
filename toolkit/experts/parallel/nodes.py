"""The ranks of an EP group on each node."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.errors import UserError


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
