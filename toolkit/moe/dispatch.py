"""Dispatch brings each token to the experts it was routed to, combine brings the results back.

The layer does not know how many machines there are: it calls `dispatch`, then `combine`, of one of two dispatchers.
Both leave rows in *slot order*: slot 0's rows first, each slot's rows in token order.

    tokens  t0 -> experts 1, 0     routed copies in token order:  t0e1 t0e0 t1e1 t1e2
            t1 -> experts 1, 2     the same in slot order:        t0e0 t0e1 t1e1 t1e2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.parallel import ShardGroups


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """What `combine` needs to undo `dispatch`."""

    rows_per_slot: Tensor
    """int64 (S): how many rows each local slot received."""
    order_N: Tensor
    """int64: which routed copy (token * K + choice) stands at each place of the sorted order."""
    inverse_N: Tensor
    """int64: where each routed copy went; the inverse permutation of `order_N`."""
    exchange: Exchange | None = None
    """How rows travelled between ranks, where they did."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The two halves of an all-to-all: rows per peer that were sent and received, and the local order after it."""

    sent: list[int]
    received: list[int]
    order_R: Tensor
    inverse_R: Tensor


class TokenDispatcher(Protocol):
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor) -> tuple[Tensor, DispatchPlan]:
        """The rows for this rank's slots in slot order, and the plan to undo it."""
        ...

    def combine(self, rows: Tensor, plan: DispatchPlan, weights_TK: Tensor) -> Tensor:
        """(T, D): for each token the sum of its experts' rows, weighted."""
        ...


def sort_by_slot(slots_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows per slot, the stable order that sorts routed copies by slot, and its inverse."""
    flat_N = slots_TK.flatten()
    order_N = flat_N.argsort(stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return torch.bincount(flat_N, minlength=num_slots), order_N, inverse_N


class _Spread(torch.autograd.Function):
    """Copy token rows to routed copies in slot order. Backward gathers, so it needs no scattered additions."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.shape = (len(x_TD), top_k, x_TD.shape[1])
        return x_TD.index_select(0, order_N // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_N,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse_N).view(ctx.shape).sum(dim=1), None, None, None


class _Permute(torch.autograd.Function):
    """Reorder rows by a permutation whose inverse is at hand for the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _AllToAll(torch.autograd.Function):
    """Send consecutive rows to each peer of a group; the backward sends gradients the way they came."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


def weighted_sum(rows_N: Tensor, inverse_N: Tensor, order_N: Tensor, weights_TK: Tensor) -> Tensor:
    """Bring rows back to token order and add up each token's K rows, weighted."""
    tokens, top_k = weights_TK.shape
    rows_TKD = _Permute.apply(rows_N, inverse_N, order_N).view(tokens, top_k, rows_N.shape[1])
    return torch.bmm(weights_TK.to(rows_N.dtype).unsqueeze(1), rows_TKD).squeeze(1)


class LocalDispatcher:
    """All experts live here; slot numbers are expert ids."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor) -> tuple[Tensor, DispatchPlan]:
        rows_per_slot, order_N, inverse_N = sort_by_slot(expert_ids_TK, self.num_experts)
        rows = _Spread.apply(x_TD, order_N, inverse_N, expert_ids_TK.shape[1])
        return rows, DispatchPlan(rows_per_slot, order_N, inverse_N)

    def combine(self, rows: Tensor, plan: DispatchPlan, weights_TK: Tensor) -> Tensor:
        return weighted_sum(rows, plan.inverse_N, plan.order_N, weights_TK)


class AllToAllDispatcher:
    """Experts live on the ranks of a shard group: `slot_of_expert` (int64, E) counts slots through all its ranks."""

    def __init__(self, slot_of_expert: Tensor, groups: ShardGroups):
        self.slot_of_expert, self.groups = slot_of_expert, groups
        self.slots = len(slot_of_expert) // groups.ep_size

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor) -> tuple[Tensor, DispatchPlan]:
        peers, group = self.groups.ep_size, self.groups.shard_group
        self.slot_of_expert = self.slot_of_expert.to(x_TD.device)
        rows_per_global_slot, order_N, inverse_N = sort_by_slot(
            self.slot_of_expert[expert_ids_TK], peers * self.slots
        )
        rows = _Spread.apply(x_TD, order_N, inverse_N, expert_ids_TK.shape[1])
        theirs = torch.empty_like(rows_per_global_slot)
        dist.all_to_all_single(theirs, rows_per_global_slot, group=group)
        rows_per_peer_slot = theirs.view(peers, self.slots)
        # The one host sync of the layer: an all-to-all takes its sizes from the host.
        sent, received = torch.stack(
            [rows_per_global_slot.view(peers, self.slots).sum(1), rows_per_peer_slot.sum(1)]
        ).tolist()
        rows = _AllToAll.apply(rows, sent, received, group)
        # Rows arrive peer by peer, in slot order within a peer: bring them into slot order.
        local_slots = torch.arange(self.slots, device=rows.device).repeat(peers)
        _, order_R, inverse_R = sort_by_slot(
            torch.repeat_interleave(local_slots, rows_per_peer_slot.flatten(), output_size=len(rows)), self.slots
        )
        rows = _Permute.apply(rows, order_R, inverse_R)
        exchange = Exchange(sent, received, order_R, inverse_R)
        return rows, DispatchPlan(rows_per_peer_slot.sum(0), order_N, inverse_N, exchange)

    def combine(self, rows: Tensor, plan: DispatchPlan, weights_TK: Tensor) -> Tensor:
        exchange = plan.exchange
        assert exchange is not None
        rows = _Permute.apply(rows, exchange.inverse_R, exchange.order_R)
        rows = _AllToAll.apply(rows, exchange.received, exchange.sent, self.groups.shard_group)
        return weighted_sum(rows, plan.inverse_N, plan.order_N, weights_TK)
