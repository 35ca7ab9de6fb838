"""Replicas of rows within an EP group: the owner of a row gets their gradients, and sends its weights to them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.experts.parallel.ownership import Ownership, local_rows, ownership_of
from toolkit.experts.placement.placement import EMPTY_ROW

if TYPE_CHECKING:
    from jaxtyping import Int


class RowsOfRanks(NamedTuple):
    """Rows of this rank that are exchanged with each rank of an EP group."""

    rows: Int[Tensor, " rows"]
    """int64, in order of rank."""
    sizes: list[int]
    """Rows per rank."""


_EXCHANGED: WeakKeyDictionary[Ownership, dict[torch.device, tuple[RowsOfRanks, RowsOfRanks]]] = WeakKeyDictionary()
"""Rows by device, where their indices stay: steps are many, and migrations few."""


@torch.no_grad()
def refresh_replicas(parameters: Iterable[Tensor]) -> None:
    """Copy each row's weights from its owner to the replicas. A collective of the EP group."""
    # The optimizer also steps a parameter that was frozen after its gradient arrived.
    for layer, ownership in _layers_with_replicas(p for p in parameters if p.requires_grad or p.grad is not None):
        weights = [local_rows(parameter.detach()) for parameter in layer]
        borrowed, lent = _replicas_on(weights[0].device, ownership)
        for rows, received in zip(weights, _exchange_rows(weights, lent, borrowed, ownership), strict=True):
            rows.index_copy_(0, borrowed.rows, received)


@torch.no_grad()
def sum_replica_gradients(parameters: Iterable[Tensor]) -> None:
    """Add the gradients of a row's replicas to its owner's gradient, and zero the replicas' gradients.

    Frozen parameters keep no gradient: weight decay changes parameters whose gradient is zero.
    """
    for layer, ownership in _layers_with_replicas(p for p in parameters if p.requires_grad):
        for parameter in layer:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grads = [local_rows(parameter.grad) for parameter in layer if parameter.grad is not None]
        borrowed, lent = _replicas_on(grads[0].device, ownership)
        for grad, received in zip(grads, _exchange_rows(grads, borrowed, lent, ownership), strict=True):
            grad.index_fill_(0, borrowed.rows, 0).index_add_(0, lent.rows, received)


def _layers_with_replicas(parameters: Iterable[Tensor]) -> Iterator[tuple[Sequence[Tensor], Ownership]]:
    """Return the parameters of each layer with replicas that can share an all-to-all."""
    layers: dict[tuple[Ownership, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        ownership = ownership_of(parameter)
        if ownership is not None and ownership.rows_of_ranks is not None:
            layers[ownership, parameter.dtype, parameter.device].append(parameter)
    for (ownership, *_), layer in layers.items():
        yield layer, ownership


def _replicas_on(device: torch.device, ownership: Ownership) -> tuple[RowsOfRanks, RowsOfRanks]:
    """Return the rows here that each rank owns, and the rows owned here that each rank replicates, by their ids."""
    of_devices = _EXCHANGED.setdefault(ownership, {})
    if device not in of_devices:
        ranks, here = ownership.rows_of_ranks or (), ownership.groups.ep_rank
        held = sorted((row_id, row) for row, row_id in enumerate(ownership.row_ids) if row_id != EMPTY_ROW)
        owned = [(ownership.owner_of.get(row_id, here), row_id, row) for row_id, row in held]
        borrowed = [[row for owner, _, row in owned if owner == rank != here] for rank in range(len(ranks))]
        lent = [
            [row for owner, i, row in owned if owner == here != rank and i in ids] for rank, ids in enumerate(ranks)
        ]
        of_devices[device] = _rows_of_ranks(borrowed, device), _rows_of_ranks(lent, device)
    return of_devices[device]


def _rows_of_ranks(lists: Sequence[Sequence[int]], device: torch.device) -> RowsOfRanks:
    index = torch.tensor([row for each in lists for row in each], dtype=torch.int64)
    return RowsOfRanks(index.to(device, non_blocking=True), [len(each) for each in lists])


def _exchange_rows(
    layer: Sequence[Tensor], sent: RowsOfRanks, received: RowsOfRanks, ownership: Ownership
) -> list[Tensor]:
    """Send rows to each rank of the EP group and return the received rows, in order of rank."""
    widths = [math.prod(rows.shape[1:]) for rows in layer]
    out = torch.cat([rows.index_select(0, sent.rows).view(-1, n) for rows, n in zip(layer, widths, strict=True)], 1)
    result = out.new_empty(len(received.rows), sum(widths))
    dist.all_to_all_single(result, out, received.sizes, sent.sizes, group=ownership.groups.ep_group)
    parts = zip(result.split(widths, 1), layer, strict=True)
    return [part.reshape(len(part), *rows.shape[1:]) for part, rows in parts]
