"""Token dispatch: rows are permuted to their experts' slots (dispatch), and back into tokens (combine).

The layer calls `mix` of a dispatcher, which is `dispatch`, the experts, and `combine`. To dispatch is a sort on one
rank; a sort and an all-to-all over an EP group; or one between nodes and one inside them
(`toolkit.experts.layer.dispatch.hierarchical_dispatch`). All give the experts rows in slot order: slot 0's rows first,
on one rank each slot's rows in token order.

    tokens  t0 -> experts 1, 0     assignments in token order:  t0e1 t0e0 t1e1 t1e2
            t1 -> experts 1, 2     the same in slot order:      t0e0 t0e1 t1e1 t1e2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toolkit.experts.layer.dispatch.exchange import Travelling, arrive, depart
from toolkit.experts.layer.dispatch.movement import Permute, Spread, WeightedSum
from toolkit.experts.layer.dispatch.order import SlotOrder, order_of_arrivals, place_within_slot, sort_by_slot
from toolkit.experts.layer.recompute import decide
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.waits import waits
from toolkit.experts.placement.placement import ExpertPlacement


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sizes of an all-to-all: rows sent to and received from each peer; and the order by slot after it."""

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


ComputeRows = Callable[[Tensor, Tensor], Tensor]
"""The outputs (N, D) of this rank's experts for rows (N, D) in slot order, given the rows of each slot, int64 (S)."""


class TokenDispatcher:
    """Sends tokens to the ranks of their experts, and brings the experts' outputs back to where the tokens are.

    A collective of the EP group, but for a dispatcher of one rank. Tokens are dispatched in `chunks`: the rows of all
    depart; then, chunk by chunk, rows arrive, pass the experts and depart for their tokens.
    """

    placement: ExpertPlacement
    chunks = 1
    announce: Callable[[Tensor, Tensor], None] | None = None
    """Called with (T, D) and expert ids before each dispatch: see `toolkit.experts.hosts.loop.join`."""

    def place(self, placement: ExpertPlacement) -> None:
        """Dispatch by `placement` from now on, which has as many slots as the former one. To be called on all ranks
        between the same two forwards."""
        raise NotImplementedError

    def dispatch(
        self, x_TD: Float[Tensor, "T D"], expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None = None
    ) -> tuple[Float[Tensor, "N D"], DispatchPlan]:
        """The rows for this rank's slots in slot order, and the plan to undo it; all tokens are one chunk.

        Assignments outside of `kept_TK` (bool; None keeps all) are not sent. When activation checkpointing recomputes
        a region, the plan of its forward is used again (see `toolkit.experts.layer.recompute`).
        """
        (plan,) = self._decided(x_TD, expert_ids_TK, kept_TK, 1)
        return self.arrive(self.depart(x_TD, plan), plan), plan

    def combine(
        self, rows: Float[Tensor, "N D"], plan: DispatchPlan, weights_TK: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        """(T, D): for each token the weighted sum of its experts' rows."""
        return self.sum_returned(self.return_rows(rows, plan, weights_TK), plan, weights_TK)

    def mix(
        self,
        x_TD: Float[Tensor, "T D"],
        expert_ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        experts: Callable[[], ComputeRows],
        *,
        kept_TK: Bool[Tensor, "T K"] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Float[Tensor, "T D"], list[DispatchPlan]]:
        """Each token's weighted sum of its experts' outputs, and the plan of each chunk of tokens.

        `meanwhile` is called once, while rows travel. `experts` is called for each chunk before its rows arrive, and
        what it returns when they are there, while rows of other chunks travel.
        """
        chunks = self.chunks
        plans = self._decided(x_TD, expert_ids_TK, kept_TK, chunks)
        if chunks > 1:
            sizes = chunk_sizes(len(x_TD), chunks)
            xs, weights = x_TD.split(sizes), weights_TK.split(sizes)
        else:
            xs, weights = (x_TD,), (weights_TK,)
        overlaps = chunks > 1 or meanwhile is not None
        departed = [self.depart(x, plan, overlaps=overlaps) for x, plan in zip(xs, plans, strict=True)]
        if meanwhile is not None:
            meanwhile()
        returned = []
        for travelling, plan, weight in zip(departed, plans, weights, strict=True):
            compute = experts()
            rows = compute(self.arrive(travelling, plan), plan.rows_per_slot)
            returned.append(self.return_rows(rows, plan, weight, overlaps=chunks > 1))
        ys = [self.sum_returned(*each) for each in zip(returned, plans, weights, strict=True)]
        return torch.cat(ys) if chunks > 1 else ys[0], plans

    def _decided(self, x_TD: Tensor, expert_ids_TK: Tensor, kept_TK: Tensor | None, chunks: int) -> list[DispatchPlan]:
        if self.announce is not None:
            self.announce(x_TD, expert_ids_TK)
        return decide(lambda: self.plans(expert_ids_TK, kept_TK, chunks))

    def plans(
        self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None, chunks: int
    ) -> list[DispatchPlan]:
        """The plan of each chunk of tokens."""
        raise NotImplementedError

    # --- the four parts: rows depart for their slots and arrive there, return, and are added up for their tokens.
    # Here slots and tokens are on one rank. ---------------------------------------------------------------------------

    def depart(self, x_TD: Float[Tensor, "T D"], plan: DispatchPlan, *, overlaps: bool = False) -> Travelling:  # noqa: ARG002
        return Travelling(Spread.apply(x_TD, plan.order), None)

    def arrive(self, rows: Travelling, plan: DispatchPlan) -> Float[Tensor, "N D"]:  # noqa: ARG002
        return arrive(rows)

    def return_rows(
        self,
        rows: Float[Tensor, "N D"],
        plan: DispatchPlan,  # noqa: ARG002
        weights_TK: Float[Tensor, "T K"],  # noqa: ARG002
        *,
        overlaps: bool = False,  # noqa: ARG002
    ) -> Travelling:
        return Travelling(rows, None)

    def sum_returned(
        self, rows: Travelling, plan: DispatchPlan, weights_TK: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        return WeightedSum.apply(arrive(rows), weights_TK, plan.order)


class LocalDispatcher(TokenDispatcher):
    """For an EP group of one rank."""

    def __init__(self, placement: ExpertPlacement):
        self.place(placement)

    def place(self, placement: ExpertPlacement) -> None:
        if placement.ranks != 1:
            raise ValueError(f"a placement on {placement.ranks} ranks for a dispatcher of one")
        self.placement, self.slots = placement, placement.stride
        identity = placement.slots[0] == tuple(range(self.slots))
        self.slot_of_expert = None if identity else torch.tensor(placement.slot_of_expert)

    def plans(
        self,
        expert_ids_TK: Int[Tensor, "T K"],
        kept_TK: Bool[Tensor, "T K"] | None,
        chunks: int = 1,  # noqa: ARG002
    ) -> list[DispatchPlan]:
        slots_TK = expert_ids_TK
        if self.slot_of_expert is not None:
            self.slot_of_expert = self.slot_of_expert.to(expert_ids_TK.device, non_blocking=True)
            slots_TK = rows_of_ids(self.slot_of_expert, expert_ids_TK)
        order = sort_by_slot(slots_TK, self.slots, kept_TK)
        if kept_TK is not None:  # the layer's one host sync, as in `AllToAllDispatcher`
            order = order.without_dropped(int(order.rows_per_slot.sum()))
        by_slot = order.rows_per_slot
        return [DispatchPlan(by_slot, by_slot if self.slot_of_expert is None else by_slot[self.slot_of_expert], order)]


class AllToAllDispatcher(TokenDispatcher):
    """For experts on the ranks of an EP group, in any `placement`: uneven, with empty slots or replicas.

    A rank sends to its local replica of an expert if it has one. Otherwise its i-th assignment for an expert with n
    replicas goes to replica (rank + i) mod n: round-robin, and deterministic.
    """

    def __init__(self, placement: ExpertPlacement, groups: ExpertGroups):
        self.groups, self.chunks = groups, groups.chunks
        self.place(placement)

    @property
    def peers(self) -> dist.ProcessGroup | None:
        """The ranks between which rows are exchanged by slot."""
        return self.groups.ep_group

    def place(self, placement: ExpertPlacement) -> None:
        if placement.ranks != self.groups.ep_size:
            raise ValueError(f"a placement on {placement.ranks} rank(s) for EP groups of {self.groups.ep_size}")
        here = self.groups.ep_rank
        self.placement = placement
        self.stride = placement.stride
        self.slots = len(placement.slots[here])
        self.slots_EC = placement.slots_of_experts()
        self.replicas_E = placement.num_replicas()
        self.slots_are_experts = placement.slot_of_expert == tuple(range(placement.ranks * placement.stride))
        """Whether expert e is in slot e of the EP group, as in contiguous placements of equal counts."""
        # Empty slots never get a row, so any expert will do.
        self.expert_of_slot = placement.expert_of_slot().flatten().clamp(min=0)
        if placement.has_replicas:
            for expert in range(placement.num_experts):
                if own := placement.replica_on(expert, here):
                    self.slots_EC[expert, 0] = here * self.stride + own.slot
                    self.replicas_E[expert] = 1

    def slots_of(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> Int[Tensor, "T K"]:
        """(T, K): the slot of each assignment, numbered through the ranks of the EP group."""
        if self.slots_are_experts:
            return expert_ids_TK
        if self.slots_EC.shape[1] == 1:
            return rows_of_ids(self.slots_EC.squeeze(1), expert_ids_TK)
        place_TK, _ = place_within_slot(expert_ids_TK, len(self.replicas_E), kept_TK)
        turn_TK = place_TK + self.groups.ep_rank
        return self.slots_EC[expert_ids_TK, turn_TK % self.replicas_E[expert_ids_TK]]

    def depart(self, x_TD: Float[Tensor, "T D"], plan: DispatchPlan, *, overlaps: bool = False) -> Travelling:
        exchange = _exchange_of(plan)
        rows = Spread.apply(x_TD, plan.order)
        return depart(rows, exchange.sent, exchange.received, self.peers, overlaps=overlaps)

    def arrive(self, rows: Travelling, plan: DispatchPlan) -> Float[Tensor, "N D"]:
        order = _exchange_of(plan).order
        return Permute.apply(arrive(rows), order.assignment_N, order.place_TK.flatten())

    def return_rows(
        self,
        rows: Float[Tensor, "N D"],
        plan: DispatchPlan,
        weights_TK: Float[Tensor, "T K"],  # noqa: ARG002
        *,
        overlaps: bool = False,
    ) -> Travelling:
        exchange = _exchange_of(plan)
        rows = Permute.apply(rows, exchange.order.place_TK.flatten(), exchange.order.assignment_N)
        return depart(rows, exchange.received, exchange.sent, self.peers, overlaps=overlaps)

    def plans(
        self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None, chunks: int
    ) -> list[DispatchPlan]:
        """Exchange the row counts of all chunks with the peers. A collective of the EP group."""
        peers, group, device = self.groups.ep_size, self.groups.ep_group, expert_ids_TK.device
        self._to_device(device)
        # `stride` is the largest number of slots of any rank, so that all exchange equally many counts.
        slots = peers * self.stride
        slots_TK = self.slots_of(expert_ids_TK, kept_TK)
        tokens = chunk_sizes(len(slots_TK), chunks)
        if chunks > 1:
            chunk_T = torch.arange(len(slots_TK), device=device) // max(1, tokens[0])
            slots_TK = slots_TK + slots * chunk_T[:, None]
        order = sort_by_slot(slots_TK, chunks * slots, kept_TK)
        to_peers_PCS = order.rows_per_slot.view(chunks, peers, self.stride).transpose(0, 1).contiguous()
        from_peers_PCS = torch.empty_like(to_peers_PCS)
        waits.timed("experts", device, dist.all_to_all_single, from_peers_PCS, to_peers_PCS, group=group)
        # The one host sync of the layer: an all-to-all takes its sizes from the host.
        sent_CP, received_CP = torch.stack([to_peers_PCS.sum(2).t(), from_peers_PCS.sum(2).t()]).tolist()
        if kept_TK is not None:
            order = order.without_dropped(sum(map(sum, sent_CP)))
        orders = order.split(tokens, [sum(sent) for sent in sent_CP]) if chunks > 1 else [order]
        plans = []
        for chunk, (part, sent, received) in enumerate(zip(orders, sent_CP, received_CP, strict=True)):
            received_order = order_of_arrivals(from_peers_PCS[:, chunk, : self.slots], sum(received))
            plans.append(
                DispatchPlan(
                    received_order.rows_per_slot,
                    self._load(part.rows_per_slot),
                    part,
                    Exchange(sent, received, received_order),
                )
            )
        return plans

    def _to_device(self, device: torch.device) -> None:
        if self.expert_of_slot.device != device:
            self.slots_EC = self.slots_EC.to(device, non_blocking=True)
            self.replicas_E = self.replicas_E.to(device, non_blocking=True)
            self.expert_of_slot = self.expert_of_slot.to(device, non_blocking=True)

    def _load(self, rows_per_slot: Int[Tensor, " S"]) -> Tensor:
        if self.slots_are_experts:
            return rows_per_slot
        return torch.zeros_like(self.replicas_E).index_add_(0, self.expert_of_slot, rows_per_slot)


def rows_of_ids(values_E: Tensor, ids_TK: Int[Tensor, "T K"]) -> Tensor:
    """(T, K): `values_E[ids_TK]`, but for negative ids, which are refused and do not count from the end."""
    return values_E.index_select(0, ids_TK.flatten()).view(ids_TK.shape)


def chunk_sizes(tokens: int, chunks: int) -> list[int]:
    """How many tokens are in each chunk: equally many, but for the last ones."""
    size = -(-tokens // chunks)
    return [max(0, min(size, tokens - chunk * size)) for chunk in range(chunks)]


def _exchange_of(plan: DispatchPlan) -> Exchange:
    assert plan.exchange is not None
    return plan.exchange
