"""Process groups of expert parallelism: which ranks share one set of experts, and which hold the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from toolkit.errors import UserError, require, require_choice
from toolkit.experts.compat import timeout_of
from toolkit.experts.parallel.collectives import gather_objects, rank, world_size
from toolkit.experts.parallel.nodes import ranks_per_node, rows_of_nodes
from toolkit.experts.placement.placement_options import ExpertExchange

Partition = tuple[tuple[int, ...], ...]
"""Groups of equal size that partition the world; ranks ascend in each group, groups by their first rank."""


@dataclass(frozen=True)
class NodeGroups:
    """Nodes of an EP group, with the same number of consecutive EP ranks on each node."""

    count: int
    """Nodes."""
    size: int
    """Ranks of the EP group on each node."""
    inside: dist.ProcessGroup
    """Ranks of the EP group on this node."""
    between: dist.ProcessGroup
    """Ranks with this rank's index on their node, one per node."""


@dataclass(frozen=True)
class ExpertGroups:
    """The world as EP groups of `ep_size` ranks; each group holds every expert.

    With 4 ranks and `ep_size` 2, {0, 1} and {2, 3} are EP groups, {0, 2} and {1, 3} expert data-parallel groups; or the
    other way round, with a stride of 2. A rank's index in its EP group determines its experts.
    """

    ep_size: int = 1
    """Ranks that together hold every expert."""
    ep_rank: int = 0
    """This rank's index in its EP group."""
    ep_group: dist.ProcessGroup | None = None
    """Ranks of this EP group; None if it has only this rank."""
    expert_dp_group: dist.ProcessGroup | None = None
    """Ranks that hold the same experts as this rank; None if no other rank does."""
    partition: Partition | None = None
    """The ranks of each EP group; None for neighbours. See `ep_groups`."""
    nodes: NodeGroups | None = None
    """Node groups of the hierarchical all-to-all; None for the flat one."""

    @property
    def ep_groups(self) -> Partition:
        """The ranks of every EP group. All groups have the same placement; the first one, which has rank 0, stands for
        them in checkpoints."""
        world = dist.get_world_size() if dist.is_initialized() else self.ep_size
        return self.partition or strided_partition(world, self.ep_size)

    @property
    def is_in_first_group(self) -> bool:
        """Whether this rank is in the EP group of rank 0."""
        return not dist.is_initialized() or dist.get_rank() in self.ep_groups[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGroups:
        """Itself: a copied model is on the same ranks."""
        return self


def make_expert_groups(
    ep_size: int | None = None,
    *,
    ep_stride: int = 1,
    ranks: Sequence[Sequence[int]] | DeviceMesh | None = None,
    exchange: ExpertExchange = "flat",
) -> ExpertGroups:
    """Split the world into EP groups. A collective: every rank calls it, with the same arguments.

    Args:
        ep_size: Expert-parallel group size. Default: the largest with this stride.
        ep_stride: Distance between the ranks of a group. Default: 1, neighbours.
        ranks: The ranks of each group, instead of `ep_size`: lists of equal length that together have every rank once,
            or one dimension of a mesh, such as `mesh["ep"]`. Experts are placed on the ranks in ascending order.
        exchange: "flat" sends a token to each rank that has its experts, "hierarchical" once to each node.

    Returns:
        The groups.

    Raises:
        UserError: The world size is not a multiple of `ep_size * ep_stride`, `ranks` are no such groups, or
            with a hierarchical exchange a group is on one node or has unequal parts of several. The same on every rank.

    Example:
        >>> groups = make_expert_groups(ep_size=2)
        >>> stacks = shard_experts(model, groups)
    """
    world = world_size()
    if ranks is None:
        partition = strided_partition(world, ep_size or max(1, world // ep_stride), ep_stride)
    else:
        require((ep_size, ep_stride) == (None, 1), "ranks", ranks, "give no ep_size and no ep_stride with them")
        partition = _agreed_partition(ranks)
    require_choice("exchange", exchange, ExpertExchange)
    if world == 1:
        return ExpertGroups()
    rank, size = dist.get_rank(), len(partition[0])
    across = [[group[place] for group in partition] for place in range(size)]
    return ExpertGroups(
        size,
        next(group.index(rank) for group in partition if rank in group),
        new_group_of_each(partition),
        new_group_of_each(across),
        partition,
        None if exchange == "flat" else _node_groups(partition),
    )


def strided_partition(world: int, ep_size: int, stride: int = 1) -> Partition:
    """Split `world` ranks into groups of `ep_size` ranks that are `stride` apart.

    With 8 ranks in groups of 2 that are 2 apart: {0, 2}, {1, 3}, {4, 6}, {5, 7}. Raises UserError if `world` is not a
    multiple of `ep_size * stride`.
    """
    groups = world // max(ep_size, 1)
    for field, value, whole, what in (
        ("ep_size", ep_size, world, f"the {world} process(es) of this launch"),
        ("ep_stride", stride, groups, f"the {groups} EP group(s) of {ep_size} among {world} process(es)"),
    ):
        divisors = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        is_divisor = value >= 1 and whole % value == 0
        require(is_divisor, field, value, f"it does not divide {what}: use one of {divisors}")
    blocks = range(0, world, ep_size * stride)
    firsts = (first for block in blocks for first in range(block, block + stride))
    return tuple(tuple(range(first, first + ep_size * stride, stride)) for first in firsts)


def _agreed_partition(ranks: Sequence[Sequence[int]] | DeviceMesh | None) -> Partition:
    """The groups that `ranks` names, on every rank. A collective: ranks may have been given different ones."""
    if isinstance(ranks, DeviceMesh):
        groups = [sorted(ranks.mesh.tolist())] if ranks.get_coordinate() is not None else []
    else:
        groups = [sorted(group) for group in ranks or ()]
    listed = [each for group in groups for each in group]
    is_listed_once = listed.count(rank()) == 1 and set(listed) <= set(range(world_size()))
    mine = next(group for group in groups if rank() in group) if is_listed_once else []
    return partition_of(gather_objects(mine))


def partition_of(group_of_rank: Sequence[Sequence[int]]) -> Partition:
    """Return the partition, given the group of each rank in ascending order, empty for a rank without a group.

    Raises UserError if ranks disagree, a rank is in no group, or groups differ in size.
    """
    partition = tuple(sorted({tuple(group) for group in group_of_rank}))
    is_whole = sorted(rank for group in partition for rank in group) == list(range(len(group_of_rank)))
    agrees = is_whole and all(rank in group for rank, group in enumerate(group_of_rank))
    if not agrees or len({len(group) for group in partition}) > 1:
        named = ", ".join(str(list(group)) for group in partition)
        raise UserError(
            f"ranks: makes groups {named} of {len(group_of_rank)} process(es). Give every rank the same groups, all "
            "of one size, with each rank in one of them."
        )
    return partition


def _node_groups(partition: Partition) -> NodeGroups:
    """Return the node groups of the EP groups in `partition`. A collective, which raises UserError on all ranks."""
    per_node = gather_objects(ranks_per_node(world_size()))
    mine = None
    for rows in [rows_of_nodes(ep_ranks, per_node) for ep_ranks in partition]:
        of_nodes = [new_group(row) for row in rows]
        of_places = [new_group(list(column)) for column in zip(*rows, strict=True)]
        for inside, row in zip(of_nodes, rows, strict=True):
            if rank() in row:
                mine = NodeGroups(len(rows), len(row), inside, of_places[row.index(rank())])
    assert mine is not None
    return mine


def new_group_of_each(partition: Iterable[Sequence[int]], *, alone: bool = False) -> dist.ProcessGroup | None:
    """Create a process group per group of ranks; return this rank's, None for a group of one unless `alone`.

    A collective.
    """
    mine = None
    for ranks in partition:
        if len(ranks) > 1 or alone:
            group = new_group(list(ranks))
            mine = group if dist.get_rank() in ranks else mine
    return mine


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """`dist.new_group` with the time-out of the world's group; torch's own default is 30 minutes. A collective."""
    return dist.new_group(ranks, timeout=timeout_of(), backend=backend)


def wait_for(work: dist.Work, device: torch.device) -> None:
    """Wait for a send or a receive of tensors on `device`.

    With gloo, raises RuntimeError after the timeout of the world's group, because its sends and receives have none.
    NCCL has its own timeout, and the host does not wait.
    """
    if device.type == "cpu":
        work.wait(timeout_of())
    else:
        work.wait()
