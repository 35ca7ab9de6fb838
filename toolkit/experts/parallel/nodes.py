"""The ranks of each node, by the launcher, and those of an EP group on each."""

from __future__ import annotations

import os
from collections.abc import Sequence

from toolkit.errors import UserError

WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def ranks_per_node(default: int) -> int:
    """The number of processes that the launcher started on this node (LOCAL_WORLD_SIZE), or `default`.

    Several launchers on one machine emulate nodes.
    """
    return number_of_launcher("LOCAL_WORLD_SIZE", least=1) or default


def launched_world() -> int | None:
    """The number of processes that the launcher of this process started. None: there is no launcher."""
    return next(filter(None, (number_of_launcher(name, least=1) for name in WORLD_SIZES)), None)


def number_of_launcher(name: str, *, least: int = 0, most: int | None = None) -> int | None:
    """Return the environment variable `name` as a number, None if it is not set.

    Raises:
        UserError: It is not an integer between `least` and `most`.
    """
    value = os.environ.get(name)
    if not value:
        return None
    number = int(value) if value.isdecimal() else -1
    if number < least or (most is not None and number > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise UserError(field=name, value=value, remedy=f"the launcher has to set an integer {limits}")
    return number


def rows_of_nodes(ep_ranks: Sequence[int], per_node: Sequence[int]) -> list[list[int]]:
    """Return the ranks of an EP group, a row for each node, given the number of ranks on the node of each rank.

    Raises UserError unless nodes have equally many ranks, and the group has equal parts of several.
    """
    nodes = sorted({rank // per_node[0] for rank in ep_ranks})
    rows = [sorted(rank for rank in ep_ranks if rank // per_node[0] == node) for node in nodes]
    if len(set(per_node)) > 1 or len(rows) == 1 or len({len(row) for row in rows}) > 1:
        raise UserError(
            f"exchange='hierarchical': the EP group of processes {', '.join(map(str, sorted(ep_ranks)))} has "
            f"{', '.join(str(len(row)) for row in rows)} on nodes of {', '.join(map(str, sorted(set(per_node))))} "
            "(LOCAL_WORLD_SIZE). Use flat, or groups with equally many on each of several nodes."
        )
    return rows
