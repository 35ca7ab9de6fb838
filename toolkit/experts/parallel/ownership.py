"""Parameters that are owned by one rank instead of replicated on all, as the experts of an EP group are.

Accelerate and DDP know one kind of parameter: every rank has a replica, gradients are averaged. A parameter whose rows
differ between ranks breaks each of their assumptions without an error. This package does what has to be done instead,
and knows nothing of experts: it sees parameters whose *rows* have owners.

| what DDP or Accelerate does                         | what is done here                                            |
|-----------------------------------------------------|--------------------------------------------------------------|
| overwrites every rank's parameters with rank 0's    | `dense.leave_out_of_ddp` puts them on DDP's ignore list     |
| averages gradients over ranks                       | `ExpertSync.before_clip`: rows already hold the sum over     |
|                                                     | their EP group's batches                                     |
| keeps replicated parameters equal                   | `ExpertSync.after_step`: of a row with replicas one rank is  |
|                                                     | the owner; it gets their gradients, steps, sends it          |
| clips by the norm of local gradients                | `ExpertSync.clip`: replicated ones count once, owned ones    |
|                                                     | are summed                                                   |
| saves rank 0's model and optimizer                  | `toolkit.checkpoint` saves each row under its uid             |
| forgets parameters that are added later             | `dense.refuse_late_parameters`                               |

Each line is a test in `tests/traps/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import EMPTY_ROW

RowsInFiles = Literal["stacked", "joined", "columns"]
"""E experts with A x B numbers each: (E, A, B); (E * A, B), one after another; or (A, B * E), the columns of experts
within those of B."""


class RowHolder(Protocol):
    """What decides which rows the ranks of an EP group hold."""

    def adopt(self, rows_of_ranks: Sequence[Sequence[int]]) -> None:
        """Hold the rows that a checkpoint was saved with, whose values are read next, where as many fit."""
        ...


class RowsOfRanks(NamedTuple):
    """Rows here that are exchanged with each rank of an EP group."""

    index_N: Int[Tensor, " N"]
    """int64, those of all ranks in order of rank."""
    sizes: list[int]
    """How many of them each rank has."""


@dataclass(eq=False)
class Ownership:
    """All that is known of an owned parameter: whose its rows are, and what has been made of it for training.

    It is the one attribute that is put on a parameter. A mapping beside the parameters would have to follow them
    through `copy.deepcopy`, pickling and sharding; torch drops attributes there, and whoever holds the rows marks the
    new parameter (`RowHolder`). Where rows are is never changed in place: `mark_owned` makes a new record, which
    carries on what training has made of the parameter.
    """

    row_ids: tuple[int, ...]
    """The uid of what each row along dimension 0 holds, or `EMPTY_ROW`."""
    groups: ExpertGroups
    rows_of_ranks: tuple[tuple[int, ...], ...] | None = None
    """The row ids of every rank of the EP group, where some rows have replicas on other ranks; else None."""
    holder: RowHolder | None = None
    in_files: RowsInFiles = "stacked"
    """How files have the rows of all ranks."""

    rows_in_use: int | None = None
    """Rows after the first so many are zero and get no gradient; None: all are in use."""
    dividing: RemovableHandle | None = None
    """The hook of `sync.divide_in_backward`."""
    optimizer: Callable[[], Optimizer | None] | None = None
    """Gives the one optimizer that may step it; None: any may."""
    computed_on: torch.device | None = None
    """Where its rows are computed with, if they are kept in the host's memory; None: where they are."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Without its holder, which holds the parameter, and marks it again when it is loaded."""
        return Ownership, (self.row_ids, self.groups, self.rows_of_ranks, None, self.in_files)

    @cached_property
    def owner_of(self) -> dict[int, int]:
        """The rank of the EP group that steps each row: the lowest that holds it. Empty where no row has replicas."""
        owners: dict[int, int] = {}
        for rank, ids in enumerate(self.rows_of_ranks or ()):
            for row_id in ids:
                owners.setdefault(row_id, rank)
        return owners

    @cached_property
    def owns(self) -> tuple[bool, ...]:
        """Whether each row holds something that this rank steps and saves."""
        here = self.groups.ep_rank
        return tuple(i != EMPTY_ROW and self.owner_of.get(i, here) == here for i in self.row_ids)

    @cached_property
    def replicated(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each rank of the EP group, in order of row id: rows here that it owns, and rows owned here that it holds
        a replica of."""
        ranks = self.rows_of_ranks or ()
        here = self.groups.ep_rank
        row_of = {row_id: row for row, row_id in enumerate(self.row_ids) if row_id != EMPTY_ROW}
        borrowed: list[list[int]] = [[] for _ in ranks]
        lent: list[list[int]] = [[] for _ in ranks]
        for row_id in sorted(row_of):
            owner = self.owner_of.get(row_id, here)
            if owner != here:
                borrowed[owner].append(row_of[row_id])
                continue
            for rank, ids in enumerate(ranks):
                if rank != here and row_id in ids:
                    lent[rank].append(row_of[row_id])
        return borrowed, lent

    def replicated_on(self, device: torch.device) -> tuple[RowsOfRanks, RowsOfRanks]:
        """`replicated`, as indices on `device`, where they stay: steps are many, and migrations make an `Ownership`."""
        if device not in self._indices:
            borrowed, lent = (_rows_of_ranks(lists, device) for lists in self.replicated)
            self._indices[device] = borrowed, lent
        return self._indices[device]

    @cached_property
    def _indices(self) -> dict[torch.device, tuple[RowsOfRanks, RowsOfRanks]]:
        return {}


def _rows_of_ranks(lists: Sequence[Sequence[int]], device: torch.device) -> RowsOfRanks:
    index_N = torch.tensor([row for each in lists for row in each], dtype=torch.int64)
    return RowsOfRanks(index_N.to(device, non_blocking=True), [len(each) for each in lists])


def mark_owned(
    parameter: nn.Parameter,
    *,
    row_ids: Sequence[int],
    groups: ExpertGroups,
    rows_of_ranks: Sequence[Sequence[int]] | None = None,
    holder: RowHolder | None = None,
    in_files: RowsInFiles = "stacked",
    computed_on: torch.device | None = None,
) -> None:
    """Declares that this rank, and its expert data-parallel group, owns the rows of `parameter`.

    Args:
        parameter: Has a row along dimension 0 for each of `row_ids`.
        row_ids: The uid of what each row holds, or `EMPTY_ROW`.
        groups: The ranks among which rows are spread.
        rows_of_ranks: What every rank of the EP group holds; needed where rows have replicas there.
        holder: Decides which rows ranks hold, when a checkpoint is read.
        in_files: How files have the rows of all ranks.
        computed_on: Where rows that stay in the host's memory are computed with; None: where they are.

    Raises:
        ValueError: Where `row_ids` are not one for each row.
    """
    if len(row_ids) != len(parameter):
        raise ValueError(f"{len(row_ids)} row ids for a parameter with {len(parameter)} rows")
    everywhere = None if rows_of_ranks is None else tuple(tuple(ids) for ids in rows_of_ranks)
    record = Ownership(tuple(row_ids), groups, everywhere, holder, in_files, computed_on=computed_on)
    if (before := ownership_of(parameter)) is not None:
        record.rows_in_use, record.optimizer = before.rows_in_use, before.optimizer
        record.dividing = before.dividing
    parameter.ownership = record  # type: ignore[attr-defined]


def ownership_of(parameter: Tensor) -> Ownership | None:
    """Returns how `parameter` is owned, or None where every rank has a replica."""
    return getattr(parameter, "ownership", None)


def stays_on_host(parameter: Tensor) -> bool:
    """Whether `parameter` is kept in the host's memory, wherever it is computed with."""
    ownership = ownership_of(parameter)
    return ownership is not None and ownership.computed_on is not None


def device_of(parameter: Tensor) -> torch.device:
    """Returns where `parameter` is computed with, and its rows are exchanged."""
    ownership = ownership_of(parameter)
    return parameter.device if ownership is None or ownership.computed_on is None else ownership.computed_on


def mark_rows_in_use(parameter: Tensor, rows: int | None) -> None:
    """Declares that rows of an owned `parameter` after the first `rows` are zero and get no gradient; None: that all
    are in use.

    Norms, clipping and averages of gradients then read the rows in use alone, and so do steps under
    `toolkit.experts.parallel.optimizer_rows.RowsInUse`. Whoever puts something into another row says so before the next
    step.
    """
    ownership = ownership_of(parameter)
    assert ownership is not None
    ownership.rows_in_use = rows


def in_use(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Returns the rows in use of `tensor`, which is `parameter`, its gradient or a state of it."""
    ownership = ownership_of(parameter)
    return tensor if ownership is None or ownership.rows_in_use is None else tensor[: ownership.rows_in_use]


def is_owned(parameter: Tensor) -> bool:
    """Whether other ranks hold other rows, so that DDP must leave `parameter` alone."""
    ownership = ownership_of(parameter)
    return ownership is not None and ownership.groups.ep_size > 1


def owned(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns those of `parameters` that are owned."""
    return [p for p in parameters if is_owned(p)]


def local_rows(tensor: Tensor) -> Tensor:
    """The rows that this rank holds: its shard of a `DTensor`, else all of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(like: DTensor, whole: Tensor) -> DTensor:
    """This rank's shard of `whole`, sharded as `like`, without communication: each rank has the same `whole`."""
    part = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    assert isinstance(part, DTensor)
    return part


def as_in_files(rows: Tensor, form: RowsInFiles) -> Tensor:
    """Returns the rows (E, A, B) of all experts as files of this form have them."""
    if form == "joined":
        return rows.flatten(0, 1)
    return rows.permute(1, 2, 0).flatten(1) if form == "columns" else rows


def stacked(saved: Tensor, form: RowsInFiles, experts: int) -> Tensor:
    """Returns the rows (E, A, B) of what files of this form have."""
    if form == "joined":
        return saved.view(experts, -1, saved.shape[1])
    return saved.view(len(saved), -1, experts).permute(2, 0, 1).contiguous() if form == "columns" else saved
