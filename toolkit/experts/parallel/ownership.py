"""Parameters whose rows are owned by ranks instead of replicated on all, such as the experts of an EP group.

Accelerate and DDP know replicated parameters only. A parameter whose rows differ between ranks breaks each of their
assumptions without an error. This package replaces them:

| Accelerate and DDP                          | this package                                                         |
|---------------------------------------------|----------------------------------------------------------------------|
| overwrite parameters with rank 0's          | `ddp.leave_out_of_ddp` puts owned parameters on DDP's ignore list    |
| average gradients over ranks                | token dispatch takes the mean over the EP group, and                 |
|                                             | `ExpertSync` the mean over the expert data-parallel group            |
| keep replicated parameters equal            | `ExpertSync`: the owner of a row with replicas gets their gradients  |
|                                             | before clipping, steps, and sends its weights                        |
| clip by the norm of local gradients         | `ExpertSync.clip`: replicated parameters count once, owned ones are  |
|                                             | summed                                                               |
| save rank 0's model and optimizer           | `toolkit.experts.state` saves each row under its uid                 |
| forget parameters that are added later      | `ddp.refuse_late_parameters`                                         |

`tests/traps/` and `tests/integrations/accelerate/` test each line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import EMPTY_ROW

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class Ownership:
    """The rows of the owned parameters of a layer, and the ranks that hold them.

    It is an attribute of each parameter. A mapping from parameters would have to follow them through `copy.deepcopy`,
    pickling and sharding. A migration makes a new record.
    """

    row_ids: tuple[int, ...]
    """The uid of each row's content along dimension 0, or `EMPTY_ROW`."""
    groups: ExpertGroups
    rows_of_ranks: tuple[tuple[int, ...], ...] | None = None
    """The row ids of every rank of the EP group, if some rows have replicas on other ranks."""

    @cached_property
    def owner_of(self) -> dict[int, int]:
        """The rank of the EP group that steps each row: the lowest that holds it. Empty if no row has replicas."""
        owners: dict[int, int] = {}
        for rank, ids in enumerate(self.rows_of_ranks or ()):
            for row_id in ids:
                owners.setdefault(row_id, rank)
        return owners

    @cached_property
    def owns(self) -> tuple[bool, ...]:
        """Whether this rank steps and saves each row."""
        here = self.groups.ep_rank
        return tuple(i != EMPTY_ROW and self.owner_of.get(i, here) == here for i in self.row_ids)


def mark_owned(
    *parameters: nn.Parameter,
    row_ids: Sequence[int],
    groups: ExpertGroups,
    rows_of_ranks: Sequence[Sequence[int]] | None = None,
) -> None:
    """Declare that this rank, and its expert data-parallel group, owns the rows of `parameters`.

    Args:
        parameters: The parameters of one layer, each with a row along dimension 0 for each of `row_ids`. Replicas of
            their rows are exchanged together.
        row_ids: The uid of each row's content, or `EMPTY_ROW`.
        groups: The ranks over which rows are sharded.
        rows_of_ranks: The row ids of every rank of the EP group. Needed if rows have replicas there.

    Raises:
        ValueError: There is not one row id per row.
    """
    everywhere = None if rows_of_ranks is None else tuple(tuple(ids) for ids in rows_of_ranks)
    ownership = Ownership(tuple(row_ids), groups, everywhere)
    for parameter in parameters:
        if len(row_ids) != len(local_rows(parameter)):
            raise ValueError(f"{len(row_ids)} row ids for a parameter with {len(local_rows(parameter))} rows")
        parameter.ownership = ownership  # type: ignore[attr-defined]


def ownership_of(parameter: Tensor) -> Ownership | None:
    """Return the rows of `parameter` and their ranks, or None if every rank has a replica."""
    return getattr(parameter, "ownership", None)


def is_owned(parameter: Tensor) -> bool:
    """Whether other ranks hold other rows, so that DDP must exclude `parameter`."""
    ownership = ownership_of(parameter)
    return ownership is not None and ownership.groups.ep_size > 1


def owned(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the owned ones of `parameters`."""
    return [p for p in parameters if is_owned(p)]


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a `DTensor`. Does not import its module, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether FSDP2 has sharded `tensor` over several ranks, instead of only casting it on one."""
    return is_dtensor(tensor) and tensor.device_mesh.size() > 1


def whole(tensor: Tensor) -> Tensor:
    """Return all of a `DTensor`, gathered over its mesh, or `tensor` itself. A collective of the mesh."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_rows(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a `DTensor`, or `tensor` itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
