"""Token dispatch on several nodes: a token's row goes to a node once, however many of its experts are there.

    rank i of node a                      rank i of node b                          rank j of node b
    a row for each pair of a token  ──►   the rows that came from all nodes,  ──►   rows of its slots,
    and a node that it visits             one for each slot that they want          in slot order

A row travels between nodes from a rank to that with the same place on the other node, and from there to the ranks of
its slots. On the way back that rank adds up the rows of each token with their weights, so one row returns to each node
that sent one. Links between nodes, which are the slow ones, carry a row for each pair of a token and another node; the
flat exchange sends one for each assignment. In return there are more all-to-alls: two for counts, one for slots, one
for weights, two for rows each way.

More letters: `V` pairs of a token and a node, `M` nodes, `R` rows that came to this rank from all nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toolkit.experts.layer.dispatch.dispatch import AllToAllDispatcher, DispatchPlan, Exchange, chunk_sizes
from toolkit.experts.layer.dispatch.exchange import AllToAll, Travelling, arrive, depart, exchange
from toolkit.experts.layer.dispatch.movement import Spread, Sum
from toolkit.experts.layer.dispatch.order import SlotOrder, order_of_arrivals, sort_by_slot
from toolkit.experts.parallel.groups import NodeGroups
from toolkit.experts.parallel.waits import waits


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalPlan(DispatchPlan):
    """`order` and `exchange` are of the rows that came to this rank from all nodes, and of the ranks of its node."""

    visits: SlotOrder
    """Of this rank's tokens: their nodes in place of slots, of which those are kept that have experts of a token."""
    sent: list[int]
    """Rows to this rank's counterpart on each node, its own included."""
    received: list[int]

    @property
    def visits_TM(self) -> Bool[Tensor, "T M"]:
        """Whether a token has experts on a node."""
        assert self.visits.kept_TK is not None
        return self.visits.kept_TK


class HierarchicalDispatcher(AllToAllDispatcher):
    """For an EP group on several nodes. Slots of assignments are those of `AllToAllDispatcher`, and so are results, up
    to rounding: a token's rows are added up node by node."""

    @property
    def nodes(self) -> NodeGroups:
        """Returns those of the EP group; groups of the flat exchange have none."""
        assert self.groups.nodes is not None
        return self.groups.nodes

    @property
    def peers(self) -> dist.ProcessGroup:
        return self.nodes.inside

    def depart(self, x_TD: Float[Tensor, "T D"], plan: DispatchPlan, *, overlaps: bool = False) -> Travelling:
        plan = _of_nodes(plan)
        rows_VD = Spread.apply(x_TD, plan.visits)
        return depart(rows_VD, plan.sent, plan.received, self.nodes.between, overlaps=overlaps)

    def arrive(self, rows: Travelling, plan: DispatchPlan) -> Float[Tensor, "N D"]:
        return super().arrive(super().depart(arrive(rows), plan), plan)

    def return_rows(
        self,
        rows: Float[Tensor, "N D"],
        plan: DispatchPlan,
        weights_TK: Float[Tensor, "T K"],
        *,
        overlaps: bool = False,
    ) -> Travelling:
        plan = _of_nodes(plan)
        weights_VK = Spread.apply(weights_TK, plan.visits)
        weights_RK = AllToAll.apply(weights_VK, plan.sent, plan.received, self.nodes.between)
        sums_RD = super().sum_returned(super().return_rows(rows, plan, weights_RK), plan, weights_RK)
        return depart(sums_RD, plan.received, plan.sent, self.nodes.between, overlaps=overlaps)

    def sum_returned(
        self,
        rows: Travelling,
        plan: DispatchPlan,
        weights_TK: Float[Tensor, "T K"],  # noqa: ARG002
    ) -> Float[Tensor, "T D"]:
        return Sum.apply(arrive(rows), _of_nodes(plan).visits)

    def plans(
        self, expert_ids_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None, chunks: int
    ) -> list[DispatchPlan]:
        """Exchange the counts of each chunk, with a host sync each: before rows depart there is nothing to wait for."""
        self._to_device(expert_ids_TK.device)
        slots_TK = self.slots_of(expert_ids_TK, kept_TK)
        if chunks == 1:
            return [self._plan(slots_TK, kept_TK)]
        sizes = chunk_sizes(len(slots_TK), chunks)
        kept = [None] * chunks if kept_TK is None else kept_TK.split(sizes)
        return [self._plan(*each) for each in zip(slots_TK.split(sizes), kept, strict=True)]

    def _plan(self, slots_TK: Int[Tensor, "T K"], kept_TK: Bool[Tensor, "T K"] | None) -> HierarchicalPlan:
        """Exchange counts, then the slots of each row. A collective of the EP group, with one host sync."""
        device, nodes = slots_TK.device, self.nodes
        slots_per_node = nodes.size * self.stride
        node_TK = slots_TK // slots_per_node
        if kept_TK is not None:
            slots_TK = slots_TK.where(kept_TK, nodes.count * slots_per_node)
            node_TK = node_TK.where(kept_TK, nodes.count)
        visits_TM = torch.zeros(len(node_TK), nodes.count + 1, dtype=torch.bool, device=device)
        visits_TM = visits_TM.scatter_(1, node_TK, True)[:, : nodes.count]
        slot_N = slots_TK.flatten()
        rows_per_slot = slot_N.new_zeros(nodes.count * slots_per_node + 1)
        rows_per_slot = rows_per_slot.scatter_add_(0, slot_N, torch.ones_like(slot_N))[:-1]

        # To each node: the rows that it gets of this rank, and how many of its slots' rows come of them.
        to_nodes_MC = torch.cat([visits_TM.sum(0)[:, None], rows_per_slot.view(nodes.count, slots_per_node)], dim=1)
        from_nodes_MC = torch.empty_like(to_nodes_MC)
        waits.timed("experts", device, dist.all_to_all_single, from_nodes_MC, to_nodes_MC, group=nodes.between)
        to_peers_PS = from_nodes_MC[:, 1:].sum(0).view(nodes.size, self.stride)
        from_peers_PS = torch.empty_like(to_peers_PS)
        waits.timed("experts", device, dist.all_to_all_single, from_peers_PS, to_peers_PS, group=nodes.inside)
        # The one host sync of the layer.
        sizes = torch.cat([to_nodes_MC[:, 0], from_nodes_MC[:, 0], to_peers_PS.sum(1), from_peers_PS.sum(1)]).tolist()
        sent, received = sizes[: nodes.count], sizes[nodes.count : 2 * nodes.count]
        sent_inside, received_inside = sizes[2 * nodes.count : -nodes.size], sizes[-nodes.size :]

        node_M = torch.arange(nodes.count, device=device)
        visits = sort_by_slot(node_M.expand(visits_TM.shape), nodes.count, visits_TM).without_dropped(sum(sent))
        # `slots_per_node` for choices that are dropped, or on another node than the one that the row visits.
        node_V = node_M.repeat_interleave(visits.rows_per_slot, output_size=sum(sent))
        wanted_VK = slots_TK.index_select(0, visits.token_N) - slots_per_node * node_V[:, None]
        elsewhere_VK = (wanted_VK < 0) | (wanted_VK >= slots_per_node)
        wanted_VK = wanted_VK.masked_fill(elsewhere_VK, slots_per_node)
        wanted_RK = exchange(wanted_VK, sent, received, nodes.between)
        order = sort_by_slot(wanted_RK, slots_per_node, wanted_RK < slots_per_node).without_dropped(sum(sent_inside))
        received_order = order_of_arrivals(from_peers_PS[:, : self.slots], sum(received_inside))
        return HierarchicalPlan(
            received_order.rows_per_slot,
            self._load(rows_per_slot),
            order,
            Exchange(sent_inside, received_inside, received_order),
            visits=visits,
            sent=sent,
            received=received,
        )


def _of_nodes(plan: DispatchPlan) -> HierarchicalPlan:
    assert isinstance(plan, HierarchicalPlan)
    return plan
