"""Token dispatch: `dispatch` sends the rows of tokens to their experts, `combine` returns one weighted sum per token.

    rows, dispatched = dispatcher.dispatch(x_TD, expert_ids_TK, weights_TK)
    rows = experts(rows, dispatched.rows_per_slot)
    y_TD = dispatcher.combine(rows, dispatched)

`receive` and `send_back` leave the copies of rows for several experts, and their weighted sums, to experts that compute
them in one autograd function.

`make_dispatcher` chooses one of three:

- `LocalDispatcher`: all experts are on this rank. Rows are sorted by slot.
- `AllToAllDispatcher`: a row goes once to each rank that has experts of its token, and one partial sum returns.
- `HierarchicalDispatcher`: a row goes once to each node, and from there once to each rank. Slow links between nodes
  carry one row per (token, node).

There is one host sync per layer: an all-to-all takes its sizes from the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.experts.layer.recompute import decide
from toolkit.experts.layer.rows import (
    Copies,
    Pairs,
    Sizes,
    Sum,
    all_to_all,
    copies_for_peers,
    count,
    place_within_slot,
    sort_by_slot,
    visited,
)
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.waits import waits
from toolkit.experts.placement.placement import ExpertPlacement

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

SLOT_TYPE = torch.int32
"""Integer type of the slots that are sent with each row."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions of a dispatch. Recomputation in the backward pass reuses them."""

    slots_TK: Int[Tensor, "T K"]
    """Slot of each pair, int64, numbered through the ranks of the EP group. -1: the pair is dropped."""
    load_E: Int[Tensor, " E"]
    """Pairs of each expert on this rank, int64, without dropped pairs."""
    pairs: int
    """Pairs of all ranks for the slots of this rank."""
    visits_TP: Bool[Tensor, "T P"] | None = None
    """Whether a token has experts on a rank of the EP group. None: the group is one rank."""
    sizes: tuple[Sizes, ...] = ()
    """Sizes of the all-to-alls."""
    copies: tuple[Copies, ...] = ()
    """Copies of the rows that the first all-to-all sends."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Inputs of `combine`, and counts for the routing log."""

    plan: Plan
    pairs: Pairs
    """Pairs of the received rows."""
    copies: tuple[Copies, ...] = ()
    """Copies that each all-to-all sent, whose results are summed."""

    @property
    def rows_per_slot(self) -> Int[Tensor, " S"]:
        """Rows of each slot of this rank, int64, shape (S,)."""
        return self.pairs.order.rows_per_slot


class TokenDispatcher(ABC):
    """Sends tokens to their experts and brings the experts' outputs back."""

    placement: ExpertPlacement
    slots: int
    """Slots of this rank."""
    announce: Callable[[Tensor, Tensor], None] | None = None
    """Called with `x_TD` and `weights_TK` before each dispatch to other ranks, inside `join`."""

    @abstractmethod
    def place(self, placement: ExpertPlacement) -> None:
        """Dispatch by `placement` from now on. Call it on all ranks between the same two forward passes."""

    @abstractmethod
    def receive(
        self,
        x_TD: Float[Tensor, "T D"],
        expert_ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        kept_TK: Bool[Tensor, "T K"] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Float[Tensor, "R D"], Dispatched]:
        """Send the rows of tokens to the ranks of their experts. A collective of the EP group.

        Args:
            x_TD: Rows of the tokens of this rank, shape (T, D).
            expert_ids_TK: Logical experts of each token, int64, shape (T, K).
            weights_TK: Routing weights, shape (T, K).
            kept_TK: False for dropped pairs, shape (T, K). None: no pair is dropped.
            meanwhile: Called while rows are in flight.

        Returns:
            The rows that have experts on this rank, shape (R, D), and the input of `send_back`.
        """

    @abstractmethod
    def send_back(self, rows_RD: Float[Tensor, "R D"], dispatched: Dispatched) -> Float[Tensor, "T D"]:
        """Return the sum of its rows to each token, shape (T, D). A collective of the EP group."""

    def dispatch(self, *args: Any, **kwargs: Any) -> tuple[Float[Tensor, "N D"], Dispatched]:
        """Send the rows of tokens to the slots of their experts. A collective of the EP group.

        Args:
            args: Positional arguments of `receive`.
            kwargs: Keyword arguments of `receive`.

        Returns:
            The rows of this rank's experts, shape (N, D), sorted by slot, and the input of `combine`.
        """
        x_RD, dispatched = self.receive(*args, **kwargs)
        return dispatched.pairs.permute(x_RD), dispatched

    def combine(self, rows_ND: Float[Tensor, "N D"], dispatched: Dispatched) -> Float[Tensor, "T D"]:
        """Return the outputs of experts to their tokens. A collective of the EP group.

        Args:
            rows_ND: Outputs for the rows of `dispatch`, shape (N, D).
            dispatched: The second result of `dispatch`.

        Returns:
            The weighted sum of its experts' outputs for each token, shape (T, D).
        """
        return self.send_back(dispatched.pairs.unpermute(rows_ND), dispatched)


def make_dispatcher(placement: ExpertPlacement, groups: ExpertGroups) -> TokenDispatcher:
    """The dispatcher for experts that `placement` puts on the ranks of an EP group."""
    if groups.ep_size == 1:
        return LocalDispatcher(placement)
    return AllToAllDispatcher(placement, groups) if groups.nodes is None else HierarchicalDispatcher(placement, groups)


class LocalDispatcher(TokenDispatcher):
    """For an EP group of one rank."""

    def __init__(self, placement: ExpertPlacement):
        self.place(placement)

    def place(self, placement: ExpertPlacement) -> None:
        if placement.ranks != 1:
            raise ValueError(f"a placement on {placement.ranks} ranks for a dispatcher of one")
        self.placement, self.slots = placement, placement.stride
        identity = placement.slots[0] == tuple(range(self.slots))
        self.slot_of_expert = None if identity else torch.tensor(placement.owner_slots)

    def receive(
        self,
        x_TD: Float[Tensor, "T D"],
        expert_ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        kept_TK: Bool[Tensor, "T K"] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Float[Tensor, "R D"], Dispatched]:
        plan = decide(lambda: self._plan(expert_ids_TK, kept_TK))
        if meanwhile is not None:
            meanwhile()
        # (T, D) -> (N, D): t0 with slots 1 0, t1 with slots 1 2 -> slot 0: t0, slot 1: t0 t1, slot 2: t1.
        order = sort_by_slot(plan.slots_TK, self.slots, plan.pairs)
        return x_TD, Dispatched(plan, Pairs(order, weights_TK))

    def send_back(self, rows_RD: Float[Tensor, "R D"], dispatched: Dispatched) -> Float[Tensor, "T D"]:  # noqa: ARG002
        return rows_RD

    def _plan(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> Plan:
        slots_TK = expert_ids_TK
        if self.slot_of_expert is not None:
            self.slot_of_expert = self.slot_of_expert.to(expert_ids_TK.device, non_blocking=True)
            slots_TK = look_up(self.slot_of_expert, expert_ids_TK)
        load_S = count(slots_TK, self.slots, kept_TK)
        load_E = load_S if self.slot_of_expert is None else load_S[self.slot_of_expert]
        if kept_TK is None:
            return Plan(slots_TK, load_E, slots_TK.numel())
        return Plan(slots_TK.where(kept_TK, -1), load_E, int(kept_TK.sum()))  # the host sync


class AllToAllDispatcher(TokenDispatcher):
    """Dispatcher for an EP group of several ranks: a row goes once to each rank that has experts of its token.

    The backward pass averages over the batches of the EP group, like DDP: on the receiving rank it divides gradients of
    the experts' outputs by P, and multiplies gradients of their inputs by P. So gradients of experts that do not come
    from tokens, such as of a weight penalty, are not divided. Powers of two lose no precision.

    With replicas, a rank sends to its local replica of an expert if it has one. Otherwise its i-th pair of an expert
    with M replicas goes to replica (rank + i) mod M.
    """

    def __init__(self, placement: ExpertPlacement, groups: ExpertGroups):
        self.groups = groups
        self.place(placement)

    def place(self, placement: ExpertPlacement) -> None:
        if placement.ranks != self.groups.ep_size:
            raise ValueError(f"a placement on {placement.ranks} rank(s) for EP groups of {self.groups.ep_size}")
        here = self.groups.ep_rank
        self.placement = placement
        # Each rank reserves the slot numbers of the rank with most slots.
        self.stride = placement.stride
        self.slots, self.first_slot = len(placement.slots[here]), here * self.stride
        self.slots_EM = placement.slots_of_experts()
        self.replicas_E = placement.num_replicas()
        self.slots_are_experts = placement.owner_slots == tuple(range(placement.ranks * placement.stride))
        """Whether expert e is in slot e, as in contiguous placements of equal counts."""
        # Empty slots never get a row, so any expert will do.
        self.expert_of_slot = placement.expert_of_slot().flatten().clamp(min=0)
        if placement.has_replicas:
            for expert in range(placement.num_experts):
                if own := placement.replica_on(expert, here):
                    self.slots_EM[expert, 0] = self.first_slot + own.slot
                    self.replicas_E[expert] = 1

    def receive(
        self,
        x_TD: Float[Tensor, "T D"],
        expert_ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        kept_TK: Bool[Tensor, "T K"] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Float[Tensor, "R D"], Dispatched]:
        if self.announce is not None:
            self.announce(x_TD, weights_TK)
        plan = decide(lambda: self._plan(expert_ids_TK, kept_TK))
        columns = x_TD, weights_TK, plan.slots_TK.to(SLOT_TYPE)
        (x_RD, weights_RK, slots_RK), copies = self._send(columns, plan, meanwhile)
        # (R, D) -> (N, D): rows by sending rank -> rows by slot, within each slot still by sending rank.
        order = sort_by_slot(slots_RK.long() - self.first_slot, self.slots, plan.pairs)
        return x_RD, Dispatched(plan, Pairs(order, weights_RK, self.groups.ep_size), copies)

    def _send(
        self, columns: tuple[Tensor, ...], plan: Plan, meanwhile: Callable[[], None] | None
    ) -> tuple[tuple[Tensor, ...], tuple[Copies, ...]]:
        """Send rows, weights and slots to the ranks of their experts. Returns them there, and the copies of rows."""
        # (T, D) -> (R, D): t0 for ranks 0 1, t1 for rank 1 -> to rank 0: t0, to rank 1: t0 t1.
        return all_to_all(columns, plan.sizes[0], plan.copies[0], meanwhile), plan.copies

    def send_back(self, rows_RD: Float[Tensor, "R D"], dispatched: Dispatched) -> Float[Tensor, "T D"]:
        # (R, D) -> (T, D): the sum of a token's ranks.
        return Sum.apply(*all_to_all((rows_RD,), dispatched.plan.sizes[0].back()), dispatched.copies[0])

    def _plan(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> Plan:
        """Exchange the numbers of rows and pairs with all ranks. A collective of the EP group."""
        slots_TK, load_E, visits_TP, to_ranks_P2 = self._count(expert_ids_TK, kept_TK)
        from_ranks_P2 = exchange_counts(to_ranks_P2, self.groups.ep_group)
        counts = torch.stack([to_ranks_P2[:, 0], from_ranks_P2[:, 0], from_ranks_P2[:, 1]])
        sent, received, pairs = counts.tolist()  # the host sync
        sizes = Sizes(self.groups.ep_group, sent, received)
        return Plan(slots_TK, load_E, sum(pairs), visits_TP, (sizes,), (copies_for_peers(visits_TP, sum(sent)),))

    def _count(
        self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None
    ) -> tuple[Int[Tensor, "T K"], Int[Tensor, " E"], Bool[Tensor, "T P"], Int[Tensor, "P 2"]]:
        """The first fields of a `Plan`, and for each rank the rows that visit it and the pairs that they are for."""
        ranks = self.groups.ep_size
        slots_TK = self.slots_of(expert_ids_TK)
        by_slot = count(slots_TK, ranks * self.stride, kept_TK)
        if kept_TK is not None:
            slots_TK = slots_TK.where(kept_TK, -1)
        visits_TP = visited(slots_TK // self.stride, ranks)
        load_E = by_slot
        if not self.slots_are_experts:
            load_E = torch.zeros_like(self.replicas_E).index_add_(0, self.expert_of_slot, by_slot)
        to_ranks_P2 = torch.stack([visits_TP.sum(0), by_slot.view(ranks, -1).sum(1)], dim=1)
        return slots_TK, load_E, visits_TP, to_ranks_P2

    def slots_of(self, expert_ids_TK: Int[Tensor, "T K"]) -> Int[Tensor, "T K"]:
        """The slot of each pair, numbered through the ranks of the EP group, shape (T, K)."""
        device = expert_ids_TK.device
        if self.expert_of_slot.device != device:
            self.slots_EM = self.slots_EM.to(device, non_blocking=True)
            self.replicas_E = self.replicas_E.to(device, non_blocking=True)
            self.expert_of_slot = self.expert_of_slot.to(device, non_blocking=True)
        if self.slots_are_experts:
            return expert_ids_TK
        if self.slots_EM.shape[1] == 1:
            return look_up(self.slots_EM.squeeze(1), expert_ids_TK)
        place_TK, _ = place_within_slot(expert_ids_TK, len(self.replicas_E))
        turn_TK = place_TK + self.groups.ep_rank
        return self.slots_EM[expert_ids_TK, turn_TK % self.replicas_E[expert_ids_TK]]


class HierarchicalDispatcher(AllToAllDispatcher):
    """For an EP group of several nodes: a row goes once to each node, to the rank with the place of the sending rank
    there, and from it once to each rank of the node that has experts of its token.

        rank i of node a                     rank i of node b                       rank j of node b
        a row for each (token, node)  ──►    rows of all nodes, a copy of each ──►  rows of its slots
                                             for each rank of b that it visits
    """

    def _send(
        self, columns: tuple[Tensor, ...], plan: Plan, meanwhile: Callable[[], None] | None
    ) -> tuple[tuple[Tensor, ...], tuple[Copies, ...]]:
        between, inside = plan.sizes
        # (T, D) -> rows by node: t0 for nodes 0 1, t1 for node 1 -> to node 0: t0, to node 1: t0 t1.
        received = all_to_all(columns, between, plan.copies[0], meanwhile)
        # -> (R, D): the same for the ranks of this node.
        ranks = len(inside.sent)
        first_slot = self.groups.ep_rank // ranks * ranks * self.stride
        visits = visited((received[2].long() - first_slot) // self.stride, ranks)
        copies = copies_for_peers(visits, sum(inside.sent))
        return all_to_all(received, inside, copies), (*plan.copies, copies)

    def send_back(self, rows_RD: Float[Tensor, "R D"], dispatched: Dispatched) -> Float[Tensor, "T D"]:
        between, inside = (sizes.back() for sizes in dispatched.plan.sizes)
        of_nodes, of_ranks = dispatched.copies
        # (R, D) -> rows by node -> (T, D): sums of a row's ranks, of a token's nodes.
        rows = Sum.apply(*all_to_all((rows_RD,), inside), of_ranks)
        return Sum.apply(*all_to_all((rows,), between), of_nodes)

    def _plan(self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> Plan:
        """Exchange the numbers of rows and pairs between nodes, then inside them. A collective of the EP group."""
        nodes = self.groups.nodes
        assert nodes is not None
        slots_TK, load_E, visits_TP, to_ranks_P2 = self._count(expert_ids_TK, kept_TK)
        visits_TG = visits_TP.unflatten(1, (nodes.count, nodes.size)).any(2)
        to_nodes_G = visits_TG.sum(0)
        # A node learns how many of its rows go on to each of its ranks, and for how many pairs.
        told = torch.cat([to_nodes_G.unsqueeze(1), to_ranks_P2.view(nodes.count, -1)], dim=1)
        come = exchange_counts(told, nodes.between)
        to_inside = come[:, 1:].sum(0).view(nodes.size, 2)
        from_inside = exchange_counts(to_inside, nodes.inside)
        counts = [to_nodes_G, come[:, 0], to_inside[:, 0], from_inside[:, 0], from_inside[:, 1]]
        numbers = iter(torch.cat(counts).tolist())  # the host sync
        there, back, sent, received, pairs = ([*islice(numbers, len(each))] for each in counts)
        sizes = Sizes(nodes.between, there, back), Sizes(nodes.inside, sent, received)
        return Plan(slots_TK, load_E, sum(pairs), visits_TP, sizes, (copies_for_peers(visits_TG, sum(there)),))


def look_up(values_E: Tensor, ids_TK: Int[Tensor, "T K"]) -> Tensor:
    """`values_E[ids_TK]`, shape (T, K). Negative ids raise."""
    return values_E.index_select(0, ids_TK.flatten()).view(ids_TK.shape)


def exchange_counts(counts: Int[Tensor, "peers numbers"], group: dist.ProcessGroup | None) -> Tensor:
    """Send row i to peer i. Returns the rows of all peers. A collective of `group`."""
    result, counts = torch.empty_like(counts), counts.contiguous()
    waits.timed("experts", counts.device, dist.all_to_all_single, result, counts, group=group)
    return result
