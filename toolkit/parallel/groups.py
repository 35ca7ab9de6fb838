"""Process groups of expert parallelism: which ranks share one set of experts, and which hold the same ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from toolkit.compat import timeout_of_world
from toolkit.config.experts import ExpertExchange
from toolkit.errors import UserError
from toolkit.parallel.nodes import ranks_per_node, rows_of_nodes
from toolkit.parallel.waits import waits


@dataclass(frozen=True)
class NodeGroups:
    """The nodes of an EP group, with equally many ranks on each: those of a node are consecutive EP ranks."""

    count: int
    """Nodes."""
    size: int
    """Ranks of the EP group on each."""
    inside: dist.ProcessGroup
    """Those on this node."""
    between: dist.ProcessGroup
    """One on each node: those with this rank's place on its node."""


@dataclass(frozen=True)
class ExpertGroups:
    """The world as EP groups of `ep_size` neighbouring ranks, each of which holds every expert.

    With 4 ranks and `ep_size` 2, {0, 1} and {2, 3} are EP groups, {0, 2} and {1, 3} expert data-parallel groups.
    """

    ep_size: int = 1
    """Ranks that together hold every expert."""
    ep_rank: int = 0
    """This rank's index in its EP group."""
    ep_group: dist.ProcessGroup | None = None
    """The ranks of this EP group; None where there is only this one."""
    expert_dp_group: dist.ProcessGroup | None = None
    """The ranks that hold the same experts as this one; None where there is only this one."""
    nodes: NodeGroups | None = None
    """None where ranks exchange rows with each other, whichever node they are on."""

    @property
    def expert_dp_size(self) -> int:
        """Ranks that hold the same experts, this one included."""
        return 1 if self.expert_dp_group is None else dist.get_world_size(self.expert_dp_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGroups:
        """Itself: a copied model is on the same ranks."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.ep_group is not None or self.expert_dp_group is not None:
            raise UserError(
                "experts on several ranks cannot be pickled, because each process has some of them only: "
                "use the save(folder) of ExpertParallel, or save_tensors."
            )
        return ExpertGroups, (self.ep_size, self.ep_rank)


def make_expert_groups(ep_size: int, *, exchange: ExpertExchange = "flat") -> ExpertGroups:
    """Split the world into EP groups of `ep_size` neighbouring ranks. A collective: every rank calls it.

    `exchange`: whether a token is sent to each rank that has experts of it, or once to each node and spread there.
    Raises UserError when `ep_size` does not divide the number of processes, and for a hierarchical exchange where EP
    groups are on one node, or have unequal parts of several.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if ep_size < 1 or world % ep_size:
        raise UserError(
            f"--ep-size {ep_size} does not divide the {world} process(es) of this launch: "
            f"use one of {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}."
        )
    if exchange not in get_args(ExpertExchange):
        raise UserError(f"exchange={exchange!r}: take one of {', '.join(get_args(ExpertExchange))}.")
    if exchange == "hierarchical" and ep_size == 1:
        raise UserError("--exchange hierarchical: each process has all experts, so nothing is exchanged: use flat.")
    if world == 1:
        return ExpertGroups()
    rank = dist.get_rank()
    ep_group = expert_dp_group = None
    for first in range(0, world, ep_size):
        ranks = list(range(first, first + ep_size))
        group = new_group(ranks)
        if rank in ranks and ep_size > 1:
            ep_group = group
    for place in range(ep_size):
        ranks = list(range(place, world, ep_size))
        group = new_group(ranks)
        if rank in ranks and len(ranks) > 1:
            expert_dp_group = group
    groups = ExpertGroups(ep_size, rank % ep_size, ep_group, expert_dp_group)
    return groups if exchange == "flat" else replace(groups, nodes=_node_groups(groups))


def _node_groups(groups: ExpertGroups) -> NodeGroups:
    """Of any EP groups of the world. A collective; raises UserError on all ranks or on none."""
    world = dist.get_world_size()
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (dist.get_process_group_ranks(groups.ep_group), ranks_per_node(world)))
    sizes = sorted({per_node for _, per_node in found})
    if len(sizes) > 1:
        raise UserError(
            f"--exchange hierarchical: nodes have {sizes[0]} to {sizes[-1]} processes: use flat, or start equally many "
            "on each."
        )
    mine = None
    for ep_ranks in sorted({tuple(ranks) for ranks, _ in found}):
        rows = rows_of_nodes(ep_ranks, sizes[0])
        of_nodes = [new_group(row) for row in rows]
        of_places = [new_group(list(column)) for column in zip(*rows, strict=True)]
        for inside, row in zip(of_nodes, rows, strict=True):
            if dist.get_rank() in row:
                mine = NodeGroups(len(rows), len(row), inside, of_places[row.index(dist.get_rank())])
    assert mine is not None
    return mine


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """`dist.new_group` with the time-out of the world's group; torch's own default is 30 minutes. A collective."""
    return dist.new_group(ranks, timeout=timeout_of_world(), backend=backend)


def wait_for(work: dist.Work, device: torch.device) -> None:
    """Wait for a send or a receive of tensors on `device`; RuntimeError after the time-out of the world's group.

    gloo's have none of their own and would wait for ever; NCCL's have, and the host does not wait for them.
    """
    if device.type == "cpu":
        work.wait(timeout_of_world())
    else:
        work.wait()


def sum_over_ranks(value: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """`value`, summed in place over all ranks where there are several. A collective."""
    if dist.is_initialized():
        waits.timed("losses", value.device, dist.all_reduce, value)
    return value


def extremes_over_ranks(
    value: Shaped[Tensor, "*shape"], group: dist.ProcessGroup | None = None
) -> tuple[Shaped[Tensor, "*shape"], Shaped[Tensor, "*shape"]]:
    """The largest and the smallest of each element over the ranks of `group`, None for all; one collective.

    Where they are the same, so is `value` on all ranks.
    """
    extremes = torch.stack([value, -value])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return extremes[0], -extremes[1]
