"""Replicas of rows within an EP group: the owner of a row gets their gradients, and sends its weights to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.experts.parallel.ownership import Ownership, RowsOfRanks, local_rows, ownership_of


@torch.no_grad()
def refresh_replicas(parameters: Iterable[Tensor]) -> None:
    """Copy each row's weights from its owner to the replicas. A collective of the EP group."""
    # The optimizer also steps a parameter that was frozen after its gradient arrived.
    for parameter, ownership in _with_replicas(p for p in parameters if p.requires_grad or p.grad is not None):
        borrowed, lent = ownership.replicas_on(parameter.device)
        rows = local_rows(parameter.detach())
        rows.index_copy_(0, borrowed.rows, _exchange_rows(rows, lent, borrowed, ownership))


@torch.no_grad()
def sum_replica_gradients(parameters: Iterable[Tensor]) -> None:
    """Add the gradients of a row's replicas to its owner's gradient, and zero the replicas' gradients.

    Frozen parameters keep no gradient: weight decay changes parameters whose gradient is zero.
    """
    for parameter, ownership in _with_replicas(p for p in parameters if p.requires_grad):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = local_rows(parameter.grad)
        borrowed, lent = ownership.replicas_on(grad.device)
        received = _exchange_rows(grad, borrowed, lent, ownership)
        grad.index_fill_(0, borrowed.rows, 0).index_add_(0, lent.rows, received)


def _with_replicas(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Ownership]]:
    for parameter in parameters:
        ownership = ownership_of(parameter)
        if ownership is not None and ownership.rows_of_ranks is not None:
            yield parameter, ownership


def _exchange_rows(rows: Tensor, sent: RowsOfRanks, received: RowsOfRanks, ownership: Ownership) -> Tensor:
    """Send rows to each rank of the EP group and return the received rows, in order of rank."""
    result = rows.new_empty(len(received.rows), *rows.shape[1:])
    out = rows.index_select(0, sent.rows)
    dist.all_to_all_single(result, out, received.sizes, sent.sizes, group=ownership.groups.ep_group)
    return result
