"""Token dispatch: rows are permuted to their experts' slots (dispatch), and back into tokens (combine).

The layer calls `dispatch`, then `combine`, of a dispatcher: a sort on one rank; a sort and an all-to-all over an EP
group; or one between nodes and one inside them (`toolkit.moe.hierarchical_dispatch`). All give the experts rows in slot
order: slot 0's rows first, on one rank each slot's rows in token order.

    tokens  t0 -> experts 1, 0     assignments in token order:  t0e1 t0e0 t1e1 t1e2
            t1 -> experts 1, 2     the same in slot order:      t0e0 t0e1 t1e1 t1e2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from toolkit.compat import embedding_bag_weights_grad
from toolkit.moe.recompute import decide
from toolkit.parallel.groups import ExpertGroups
from toolkit.parallel.waits import waits
from toolkit.placement.placement import ExpertPlacement


@dataclass(frozen=True, slots=True)
class SlotOrder:
    """N = T * K assignments, numbered token * K + choice, sorted by slot. Tensors are int64, `kept_TK` is bool."""

    rows_per_slot: Int[Tensor, " S"]
    """(S): the number of assignments of each slot."""
    assignment_N: Int[Tensor, " N"]
    """The assignment at each place of the sorted order; the sort is stable."""
    token_N: Int[Tensor, " N"]
    """The token of that assignment."""
    place_TK: Int[Tensor, "T K"]
    """The place of each assignment: the inverse permutation of `assignment_N`."""
    kept_TK: Bool[Tensor, "T K"] | None = None
    """False for dropped assignments; None if none is dropped."""

    def without_dropped(self, rows: int) -> SlotOrder:
        """The first `rows` places, those of kept assignments; dropped ones have place 0 and weight 0."""
        assert self.kept_TK is not None
        place_TK = self.place_TK.where(self.kept_TK, 0)
        return replace(self, assignment_N=self.assignment_N[:rows], token_N=self.token_N[:rows], place_TK=place_TK)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sizes of an all-to-all: rows sent to and received from each peer; and the sort by slot after it."""

    sent: list[int]
    received: list[int]
    order: SlotOrder


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """What `combine` needs to undo `dispatch`, and the load that was counted."""

    rows_per_slot: Int[Tensor, " S"]
    """int64 (S): rows that each local slot received."""
    load_E: Int[Tensor, " E"]
    """int64: this rank's assignments per expert, without dropped ones."""
    order: SlotOrder
    """Of this rank's assignments."""
    exchange: Exchange | None = None
    """None on one rank."""


class TokenDispatcher(Protocol):
    placement: ExpertPlacement

    def place(self, placement: ExpertPlacement) -> None:
        """Dispatch by `placement` from now on, which has as many slots as the former one."""
        ...

    def dispatch(
        self, x_TD: Float[Tensor, "T D"], expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None = None
    ) -> tuple[Float[Tensor, "N D"], DispatchPlan]:
        """The rows for this rank's slots in slot order, and the plan to undo it.

        Assignments outside of `kept_TK` (bool; None keeps all) are not sent. When activation checkpointing recomputes
        a region, the plan of its forward is used again (see `toolkit.moe.recompute`).
        """
        ...

    def combine(
        self, rows: Float[Tensor, "N D"], plan: DispatchPlan, weights_TK: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        """(T, D): for each token the weighted sum of its experts' rows."""
        ...


def sort_by_slot(slots_TK: Int[Tensor, "T K"], num_slots: int, kept_TK: Bool[Tensor, "T K"] | None = None) -> SlotOrder:
    """Count assignments per slot and sort them stably by slot, dropped ones last. No host sync."""
    if kept_TK is not None:
        order = sort_by_slot(slots_TK.where(kept_TK, num_slots), num_slots + 1)
        return replace(order, rows_per_slot=order.rows_per_slot[:num_slots], kept_TK=kept_TK)
    slot_N = slots_TK.flatten()
    top_k = slots_TK.shape[1]
    assignment_N = slot_N.argsort(stable=True)
    place_N = torch.empty_like(assignment_N).scatter_(
        0, assignment_N, torch.arange(len(assignment_N), device=assignment_N.device)
    )
    # Not bincount: on a GPU it asks for the largest value first, which is a host sync.
    rows_per_slot = slot_N.new_zeros(num_slots).scatter_add_(0, slot_N, torch.ones_like(slot_N))
    return SlotOrder(
        rows_per_slot, assignment_N, assignment_N // top_k if top_k > 1 else assignment_N, place_N.view(slots_TK.shape)
    )


def _sum_rows(rows: Tensor, places_TK: Int[Tensor, "T K"], weights_TK: Float[Tensor, "T K"] | None = None) -> Tensor:
    """For each token the (weighted) sum of the rows at its K places, in one pass over them."""
    if not len(rows):  # no tokens, or all assignments were dropped
        return rows.new_zeros(len(places_TK), rows.shape[1])
    return nn.functional.embedding_bag(places_TK, rows.detach(), mode="sum", per_sample_weights=weights_TK)


def _dot_rows(grad_TD: Float[Tensor, "T D"], rows_ND: Float[Tensor, "N D"], places_TK: Int[Tensor, "T K"]) -> Tensor:
    """(T, K): the dot product of each token's gradient with the row at each of its places, without gathering rows.

    The gradient of `embedding_bag` by its weights. Autograd computes it only along with that by the table.
    """
    tokens, top_k = places_TK.shape
    first_T = torch.arange(0, tokens * top_k, top_k, device=places_TK.device)
    token_N = torch.arange(tokens * top_k, device=places_TK.device) // top_k
    return embedding_bag_weights_grad(grad_TD, rows_ND, places_TK.flatten(), first_T, token_N).view(places_TK.shape)


class _Spread(torch.autograd.Function):
    """Gather the token row of each assignment, in slot order. The backward gathers too, in place of scattered adds."""

    @staticmethod
    def forward(ctx: Any, x_TD: Float[Tensor, "T D"], order: SlotOrder) -> Tensor:
        ctx.save_for_backward(order.place_TK, order.kept_TK)
        return x_TD.index_select(0, order.token_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        place_TK, kept_TK = ctx.saved_tensors
        grad_ND = grads[0].contiguous()
        return _sum_rows(grad_ND, place_TK, None if kept_TK is None else kept_TK.to(grad_ND.dtype)), None


class _WeightedSum(torch.autograd.Function):
    """The inverse of `_Spread`: the sum of each token's K rows, weighted."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Float[Tensor, "N D"], weights_TK: Float[Tensor, "T K"], order: SlotOrder) -> Tensor:
        ctx.save_for_backward(rows_ND, weights_TK, order.assignment_N, order.token_N, order.place_TK, order.kept_TK)
        if order.kept_TK is not None:
            weights_TK = weights_TK * order.kept_TK
        return _sum_rows(rows_ND, order.place_TK, weights_TK.to(rows_ND.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weights_TK, assignment_N, token_N, place_TK, kept_TK = ctx.saved_tensors
        grad_TD = grads[0].contiguous()
        weights_N = weights_TK.flatten().index_select(0, assignment_N)
        if not len(rows_ND):
            return rows_ND, torch.zeros_like(weights_TK), None
        if rows_ND.dtype == weights_TK.dtype:
            grad_ND = _sum_rows(grad_TD, token_N.unsqueeze(1), weights_N.unsqueeze(1))
            grad_weights_TK = _dot_rows(grad_TD, rows_ND, place_TK)
        else:  # half precision: sum in the precision of the weights
            grad_ND = grad_TD.index_select(0, token_N)
            grad_weights_TK = (grad_ND * rows_ND).sum(dim=1, dtype=weights_TK.dtype)[place_TK]
            grad_ND = grad_ND.mul_(weights_N.unsqueeze(1))
        return grad_ND, grad_weights_TK if kept_TK is None else grad_weights_TK * kept_TK, None


class _Permute(torch.autograd.Function):
    """Permute rows; the backward permutes by `inverse`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _AllToAll(torch.autograd.Function):
    """Send consecutive rows to each peer of a group; the backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    rows = rows.contiguous()
    waits.timed("experts", rows.device, dist.all_to_all_single, result, rows, received, sent, group=group)
    return result


class LocalDispatcher:
    """For an EP group of one rank."""

    def __init__(self, placement: ExpertPlacement):
        self.place(placement)

    def place(self, placement: ExpertPlacement) -> None:
        """Dispatch by `placement` from now on."""
        if placement.ranks != 1:
            raise ValueError(f"a placement on {placement.ranks} ranks for a dispatcher of one")
        self.placement, self.slots = placement, placement.stride
        identity = placement.slots[0] == tuple(range(self.slots))
        self.slot_of_expert = None if identity else torch.tensor(placement.slot_of_expert)

    def dispatch(
        self, x_TD: Float[Tensor, "T D"], expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None = None
    ) -> tuple[Float[Tensor, "N D"], DispatchPlan]:
        plan = decide(lambda: self.plan(expert_ids_TK, kept_TK))
        return _Spread.apply(x_TD, plan.order), plan

    def plan(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> DispatchPlan:
        slots_TK = expert_ids_TK
        if self.slot_of_expert is not None:
            self.slot_of_expert = self.slot_of_expert.to(expert_ids_TK.device)
            slots_TK = self.slot_of_expert[expert_ids_TK]
        order = sort_by_slot(slots_TK, self.slots, kept_TK)
        if kept_TK is not None:  # the layer's one host sync, as in `AllToAllDispatcher`
            order = order.without_dropped(int(order.rows_per_slot.sum()))
        by_slot = order.rows_per_slot
        return DispatchPlan(by_slot, by_slot if self.slot_of_expert is None else by_slot[self.slot_of_expert], order)

    def combine(
        self, rows: Float[Tensor, "N D"], plan: DispatchPlan, weights_TK: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        return _WeightedSum.apply(rows, weights_TK, plan.order)


class AllToAllDispatcher:
    """For experts on the ranks of an EP group, in any `placement`: uneven, with empty slots or replicas.

    A rank sends to its local replica of an expert if it has one. Otherwise its i-th assignment for an expert with n
    replicas goes to replica (rank + i) mod n: round-robin, and deterministic.
    """

    def __init__(self, placement: ExpertPlacement, groups: ExpertGroups):
        self.groups = groups
        self.announce: Callable[[Tensor, Tensor], None] | None = None
        """Called with (T, D) and expert ids before each dispatch: see `toolkit.hosts.join`."""
        self.place(placement)

    def place(self, placement: ExpertPlacement) -> None:
        """Dispatch by `placement` from now on. To be called on all ranks between the same two forwards."""
        if placement.ranks != self.groups.ep_size:
            raise ValueError(f"a placement on {placement.ranks} rank(s) for EP groups of {self.groups.ep_size}")
        here = self.groups.ep_rank
        self.placement = placement
        self.stride = placement.stride
        self.slots = len(placement.slots[here])
        self.slots_EC = placement.slots_of_experts()
        self.replicas_E = placement.num_replicas()
        # Empty slots never get a row, so any expert will do.
        self.expert_of_slot = placement.expert_of_slot().flatten().clamp(min=0)
        if placement.has_replicas:
            for expert in range(placement.num_experts):
                if own := placement.replica_on(expert, here):
                    self.slots_EC[expert, 0] = here * self.stride + own.slot
                    self.replicas_E[expert] = 1

    def slots_of(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> Int[Tensor, "T K"]:
        """(T, K): the slot of each assignment, numbered through the ranks of the EP group."""
        if self.slots_EC.shape[1] == 1:
            return self.slots_EC[expert_ids_TK, 0]
        by_expert = sort_by_slot(expert_ids_TK, len(self.replicas_E), kept_TK)
        first_E = by_expert.rows_per_slot.cumsum(0) - by_expert.rows_per_slot
        turn_TK = by_expert.place_TK - first_E[expert_ids_TK] + self.groups.ep_rank
        return self.slots_EC[expert_ids_TK, turn_TK % self.replicas_E[expert_ids_TK]]

    def dispatch(
        self, x_TD: Float[Tensor, "T D"], expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None = None
    ) -> tuple[Float[Tensor, "N D"], DispatchPlan]:
        if self.announce is not None:
            self.announce(x_TD, expert_ids_TK)
        plan = decide(lambda: self.plan(expert_ids_TK, kept_TK))
        exchange = plan.exchange
        assert exchange is not None
        rows = _AllToAll.apply(_Spread.apply(x_TD, plan.order), exchange.sent, exchange.received, self.groups.ep_group)
        return _Permute.apply(rows, exchange.order.assignment_N, exchange.order.place_TK.flatten()), plan

    def plan(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> DispatchPlan:
        """Exchange row counts with the peers. A collective of the EP group."""
        peers, group, device = self.groups.ep_size, self.groups.ep_group, expert_ids_TK.device
        self._to_device(device)
        # `stride` is the largest number of slots of any rank, so that all exchange equally many counts.
        order = sort_by_slot(self.slots_of(expert_ids_TK, kept_TK), peers * self.stride, kept_TK)
        to_peers_PS = order.rows_per_slot.view(peers, self.stride)
        from_peers_PS = torch.empty_like(to_peers_PS)
        waits.timed("experts", device, dist.all_to_all_single, from_peers_PS, to_peers_PS, group=group)
        # The one host sync of the layer: an all-to-all takes its sizes from the host.
        sent, received = torch.stack([to_peers_PS.sum(1), from_peers_PS.sum(1)]).tolist()
        if kept_TK is not None:
            order = order.without_dropped(sum(sent))
        # Rows arrive peer by peer, in slot order within a peer: bring them into slot order.
        slot_PS = torch.arange(self.stride, device=device).repeat(peers)
        slot_R = torch.repeat_interleave(slot_PS, from_peers_PS.flatten(), output_size=sum(received))
        received_order = sort_by_slot(slot_R.unsqueeze(1), self.slots)
        return DispatchPlan(
            received_order.rows_per_slot,
            self._load(order.rows_per_slot),
            order,
            Exchange(sent, received, received_order),
        )

    def _to_device(self, device: torch.device) -> None:
        if self.expert_of_slot.device != device:
            self.slots_EC, self.replicas_E = self.slots_EC.to(device), self.replicas_E.to(device)
            self.expert_of_slot = self.expert_of_slot.to(device)

    def _load(self, rows_per_slot: Int[Tensor, " S"]) -> Tensor:
        return torch.zeros_like(self.replicas_E).index_add_(0, self.expert_of_slot, rows_per_slot)

    def combine(
        self, rows: Float[Tensor, "N D"], plan: DispatchPlan, weights_TK: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        exchange = plan.exchange
        assert exchange is not None
        rows = _Permute.apply(rows, exchange.order.place_TK.flatten(), exchange.order.assignment_N)
        rows = _AllToAll.apply(rows, exchange.received, exchange.sent, self.groups.ep_group)
        return _WeightedSum.apply(rows, weights_TK, plan.order)
