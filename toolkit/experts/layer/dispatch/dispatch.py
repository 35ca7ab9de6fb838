"""Token dispatch: rows are copied to their experts' slots (dispatch), and added up for their tokens (combine).

The layer calls `mix` of a dispatcher, which is `dispatch`, the experts, and `combine`. On one rank to dispatch is a
sort. Between ranks a token's row goes once to each rank that has experts of it, with their slots and the router's
weights, and is copied there for each; the rank adds up their outputs, weighted, so that one row returns. Experts get
rows in slot order: slot 0's rows first, on one rank each slot's rows in token order.

    tokens  t0 -> experts 1, 0     assignments in token order:  t0e1 t0e0 t1e1 t1e2
            t1 -> experts 1, 2     the same in slot order:      t0e0 t0e1 t1e1 t1e2

Between nodes rows take two legs. A row goes once to each node, to the rank with the place of its source there, and from
it once to each rank that has experts of it: links between nodes, which are the slow ones, carry a row for each pair of
a token and another node.

    rank i of node a                      rank i of node b                           rank j of node b
    a row for each pair of a token  ──►   the rows that came from all nodes, one ──► rows of its slots,
    and a node that it visits             for each rank of the node that it visits   in slot order

More letters: `P` peers of a leg, `R` rows that came over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toolkit.experts.layer.dispatch.exchange import AllToAll, Sizes, Travelling, arrive, depart
from toolkit.experts.layer.dispatch.movement import Copy, Sum, WeightedSum
from toolkit.experts.layer.dispatch.order import (
    Copies,
    SlotOrder,
    count,
    place_within_slot,
    sort_by_slot,
    visited,
    visits,
)
from toolkit.experts.layer.recompute import decide
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.waits import waits
from toolkit.experts.placement.placement import ExpertPlacement


@dataclass(frozen=True, slots=True)
class Leg:
    """A way of rows to the peers that they visit."""

    sizes: Sizes
    first_slot: int
    """Of the peers, numbered through the ranks of the EP group."""
    slots_of_peer: int
    visits: Copies | None = None
    """The copies of the rows that take this leg; None until they are known."""

    def visited_by(self, slots_TK: Int[Tensor, "T K"]) -> Leg:
        """This leg, for rows that have these slots."""
        peers = len(self.sizes.sent)
        peer_TK = (slots_TK - self.first_slot).div(self.slots_of_peer, rounding_mode="floor")
        peer_TK = peer_TK.where((peer_TK >= 0) & (peer_TK < peers), peers)
        return replace(self, visits=visits(visited(peer_TK, peers), sum(self.sizes.sent)))


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """How many rows go where, and the load that was counted."""

    slots_TK: Int[Tensor, "T K"]
    """int64: the slot of each assignment, numbered through the ranks of the EP group; -1 where it is dropped."""
    load_E: Int[Tensor, " E"]
    """int64: this rank's assignments per expert, without dropped ones."""
    assignments: int
    """Of all ranks, to this rank's slots."""
    legs: tuple[Leg, ...] = ()
    visits_TP: Bool[Tensor, "T P"] | None = None
    """Whether a token has experts on a rank of the EP group; None where that is one rank."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """What came with the rows of this rank's experts, by which `combine` undoes `dispatch`."""

    plan: DispatchPlan
    legs: tuple[Leg, ...]
    weights_RK: Float[Tensor, "R K"]
    order: SlotOrder

    @property
    def rows_per_slot(self) -> Int[Tensor, " S"]:
        """int64 (S): rows that each local slot received."""
        return self.order.rows_per_slot


SLOT_TYPE = torch.int32
"""In which slots travel with a row."""

ComputeRows = Callable[[Tensor, Tensor], Tensor]
"""The outputs (N, D) of this rank's experts for rows (N, D) in slot order, given the rows of each slot, int64 (S)."""


class TokenDispatcher:
    """Sends tokens to the ranks of their experts, and brings the experts' outputs back to where the tokens are.

    A collective of the EP group, but for a dispatcher of one rank.
    """

    placement: ExpertPlacement
    slots: int
    """Of this rank."""
    first_slot = 0
    """Of this rank, numbered through the ranks of the EP group."""
    announce: Callable[[Tensor, Tensor], None] | None = None
    """Called with (T, D) and expert ids before each dispatch: see `toolkit.experts.sharding.join`."""

    def place(self, placement: ExpertPlacement) -> None:
        """Dispatch by `placement` from now on, which has as many slots as the former one. To be called on all ranks
        between the same two forwards."""
        raise NotImplementedError

    def dispatch(
        self,
        x_TD: Float[Tensor, "T D"],
        expert_ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        kept_TK: Bool[Tensor, "T K"] | None = None,
    ) -> tuple[Float[Tensor, "N D"], Arrived]:
        """The rows for this rank's slots in slot order, and what undoes it.

        Assignments outside of `kept_TK` (bool; None keeps all) are not sent. When activation checkpointing recomputes
        a region, the plan of its forward is used again (see `toolkit.experts.layer.recompute`).
        """
        plan = self._decided(x_TD, expert_ids_TK, kept_TK)
        return self.arrive(self.depart(x_TD, weights_TK, plan), plan)

    def combine(self, rows: Float[Tensor, "N D"], arrived: Arrived) -> Float[Tensor, "T D"]:
        """(T, D): for each token the weighted sum of its experts' rows."""
        return self.sum_returned(self.return_rows(rows, arrived), arrived)

    def mix(
        self,
        x_TD: Float[Tensor, "T D"],
        expert_ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        experts: Callable[[], ComputeRows],
        *,
        kept_TK: Bool[Tensor, "T K"] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Float[Tensor, "T D"], DispatchPlan]:
        """Each token's weighted sum of its experts' outputs, and the plan.

        `meanwhile` is called while rows travel, then `experts`, and what it returns when the rows have arrived.
        """
        plan = self._decided(x_TD, expert_ids_TK, kept_TK)
        departed = self.depart(x_TD, weights_TK, plan, overlaps=meanwhile is not None)
        if meanwhile is not None:
            meanwhile()
        compute = experts()
        rows, arrived = self.arrive(departed, plan)
        return self.combine(compute(rows, arrived.rows_per_slot), arrived), plan

    def _decided(self, x_TD: Tensor, expert_ids_TK: Tensor, kept_TK: Tensor | None) -> DispatchPlan:
        if self.announce is not None:
            self.announce(x_TD, expert_ids_TK)
        return decide(lambda: self.plan(expert_ids_TK, kept_TK))

    def plan(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> DispatchPlan:
        """Where rows go. A collective of the EP group."""
        raise NotImplementedError

    # --- the four parts: rows depart for their slots and arrive there, return, and are added up for their tokens -----

    def depart(
        self,
        x_TD: Float[Tensor, "T D"],
        weights_TK: Float[Tensor, "T K"],
        plan: DispatchPlan,
        *,
        overlaps: bool = False,
    ) -> Travelling:
        if not plan.legs:
            return Travelling((x_TD, weights_TK, plan.slots_TK), None)
        leg, columns = plan.legs[0], (x_TD, weights_TK, plan.slots_TK.to(SLOT_TYPE))
        return depart(columns, leg.sizes, leg.visits, overlaps=overlaps)

    def arrive(self, rows: Travelling, plan: DispatchPlan) -> tuple[Float[Tensor, "N D"], Arrived]:
        columns = arrive(rows)
        legs = list(plan.legs[:1])
        for leg in plan.legs[1:]:
            legs.append(leg.visited_by(columns[2].long()))
            columns = AllToAll.apply(leg.sizes, legs[-1].visits, *columns)
        x_RD, weights_RK, slots_RK = columns
        order = sort_by_slot(slots_RK.long() - self.first_slot, self.slots, plan.assignments)
        return Copy.apply(x_RD, order), Arrived(plan, tuple(legs), weights_RK, order)

    def return_rows(self, rows: Float[Tensor, "N D"], arrived: Arrived) -> Travelling:
        rows = WeightedSum.apply(rows, arrived.weights_RK, arrived.order)
        if not arrived.legs:
            return Travelling((rows,), None)
        for leg in arrived.legs[:0:-1]:
            rows = Sum.apply(*AllToAll.apply(leg.sizes.back(), None, rows), leg.visits)
        return depart((rows,), arrived.legs[0].sizes.back(), overlaps=False)

    def sum_returned(self, rows: Travelling, arrived: Arrived) -> Float[Tensor, "T D"]:
        (rows_RD,) = arrive(rows)
        return Sum.apply(rows_RD, arrived.legs[0].visits) if arrived.legs else rows_RD


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

    def plan(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> DispatchPlan:
        slots_TK = expert_ids_TK
        if self.slot_of_expert is not None:
            self.slot_of_expert = self.slot_of_expert.to(expert_ids_TK.device, non_blocking=True)
            slots_TK = rows_of_ids(self.slot_of_expert, expert_ids_TK)
        by_slot = _count_kept(slots_TK, kept_TK, self.slots)
        load_E = by_slot if self.slot_of_expert is None else by_slot[self.slot_of_expert]
        if kept_TK is None:
            return DispatchPlan(slots_TK, load_E, slots_TK.numel())
        # The layer's one host sync, as in `AllToAllDispatcher`.
        return DispatchPlan(slots_TK.where(kept_TK, -1), load_E, int(kept_TK.sum()))


class AllToAllDispatcher(TokenDispatcher):
    """For experts on the ranks of an EP group, in any `placement`: uneven, with empty slots or replicas. Rows take one
    leg, or two where the `groups` have nodes.

    A rank sends to its local replica of an expert if it has one. Otherwise its i-th assignment for an expert with n
    replicas goes to replica (rank + i) mod n: round-robin, and deterministic.
    """

    def __init__(self, placement: ExpertPlacement, groups: ExpertGroups):
        self.groups = groups
        self.place(placement)

    def place(self, placement: ExpertPlacement) -> None:
        if placement.ranks != self.groups.ep_size:
            raise ValueError(f"a placement on {placement.ranks} rank(s) for EP groups of {self.groups.ep_size}")
        here = self.groups.ep_rank
        self.placement = placement
        # The largest number of slots of any rank: all have as many numbers.
        self.stride = placement.stride
        self.slots, self.first_slot = len(placement.slots[here]), here * self.stride
        self.slots_EC = placement.slots_of_experts()
        self.replicas_E = placement.num_replicas()
        self.slots_are_experts = placement.slot_of_expert == tuple(range(placement.ranks * placement.stride))
        """Whether expert e is in slot e of the EP group, as in contiguous placements of equal counts."""
        # Empty slots never get a row, so any expert will do.
        self.expert_of_slot = placement.expert_of_slot().flatten().clamp(min=0)
        if placement.has_replicas:
            for expert in range(placement.num_experts):
                if own := placement.replica_on(expert, here):
                    self.slots_EC[expert, 0] = self.first_slot + own.slot
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

    def plan(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> DispatchPlan:
        """Exchange sizes with the peers. A collective of the EP group."""
        self._to_device(expert_ids_TK.device)
        slots_TK = self.slots_of(expert_ids_TK, kept_TK)
        ranks = self.groups.ep_size
        by_slot = _count_kept(slots_TK, kept_TK, ranks * self.stride)
        rank_TK = slots_TK // self.stride
        if kept_TK is not None:
            slots_TK, rank_TK = slots_TK.where(kept_TK, -1), rank_TK.where(kept_TK, ranks)
        visits_TP = visited(rank_TK, ranks)
        # To each rank: the rows that visit it, and the assignments that they are for.
        to_ranks_P2 = torch.stack([visits_TP.sum(0), self._by_rank(by_slot)], dim=1)
        if self.groups.nodes is None:
            legs, assignments = self._legs(visits_TP, to_ranks_P2)
        else:
            legs, assignments = self._legs_by_node(slots_TK, visits_TP, to_ranks_P2)
        return DispatchPlan(slots_TK, self._load(by_slot), assignments, legs, visits_TP)

    def _legs(self, visits_TP: Bool[Tensor, "T P"], to_ranks_P2: Int[Tensor, "P 2"]) -> tuple[tuple[Leg, ...], int]:
        """The one leg, and the assignments to this rank. A collective of the EP group, with the layer's one host sync:
        an all-to-all takes its sizes from the host."""
        group = self.groups.ep_group
        come_P2 = _exchange_equal(to_ranks_P2, group)
        sent, received, assignments = torch.stack([to_ranks_P2[:, 0], come_P2[:, 0], come_P2[:, 1]]).tolist()
        copies = visits(visits_TP, sum(sent))
        return (Leg(Sizes(sent, received, group), 0, self.stride, copies),), sum(assignments)

    def _legs_by_node(
        self, slots_TK: Int[Tensor, "T K"], visits_TP: Bool[Tensor, "T P"], to_ranks_P2: Int[Tensor, "P 2"]
    ) -> tuple[tuple[Leg, ...], int]:
        """The legs between nodes and inside this one, and the assignments to this rank."""
        nodes = self.groups.nodes
        assert nodes is not None
        to_nodes_M = visits_TP.reshape(-1, nodes.count, nodes.size).any(2).sum(0)
        # A node learns how many of its rows go on to each of its ranks, and for how many assignments.
        told = torch.cat([to_nodes_M.unsqueeze(1), to_ranks_P2.reshape(nodes.count, -1)], dim=1)
        come = _exchange_equal(told, nodes.between)
        inside_P2 = come[:, 1:].sum(0).view(nodes.size, 2)
        come_P2 = _exchange_equal(inside_P2, nodes.inside)
        # The layer's one host sync.
        numbers = torch.cat([to_nodes_M, come[:, 0], inside_P2[:, 0], come_P2[:, 0], come_P2[:, 1]]).tolist()
        there, back = numbers[: nodes.count], numbers[nodes.count : 2 * nodes.count]
        last = numbers[2 * nodes.count :]
        sent, received, assignments = (last[first * nodes.size : (first + 1) * nodes.size] for first in range(3))
        between = Leg(Sizes(there, back, nodes.between), 0, nodes.size * self.stride).visited_by(slots_TK)
        first_slot = self.first_slot // (nodes.size * self.stride) * nodes.size * self.stride
        return (between, Leg(Sizes(sent, received, nodes.inside), first_slot, self.stride)), sum(assignments)

    def _by_rank(self, by_slot: Int[Tensor, " S"]) -> Int[Tensor, " P"]:
        return by_slot.view(self.groups.ep_size, -1).sum(1)

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


def _count_kept(slots_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None, num_slots: int) -> Tensor:
    slot_N = slots_TK.flatten()
    if kept_TK is None:
        return count(slot_N, num_slots)
    return slot_N.new_zeros(num_slots).scatter_add_(0, slot_N, kept_TK.flatten().to(slot_N.dtype))


def _exchange_equal(rows: Tensor, group: Any) -> Tensor:
    """Send row i to peer i; returns those of all peers. A collective of `group`."""
    result, rows = torch.empty_like(rows), rows.contiguous()
    waits.timed("experts", rows.device, dist.all_to_all_single, result, rows, group=group)
    return result
