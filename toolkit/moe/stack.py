"""The experts of one layer on this rank: stacked parameters, their placement, and the log of the layer's routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from toolkit.moe.dispatch import AllToAllDispatcher, DispatchPlan, LocalDispatcher, SlotOrder, TokenDispatcher
from toolkit.moe.load.metrics import RowBytes
from toolkit.moe.load.routing_log import Choices, RoutedForward, RoutingLog
from toolkit.parallel.ownership import ExpertGroups, mark_owned
from toolkit.placement.placement import ExpertPlacement


def make_dispatcher(placement: ExpertPlacement, groups: ExpertGroups) -> TokenDispatcher:
    """The dispatcher for experts on the ranks of `groups`."""
    return LocalDispatcher(placement) if groups.ep_size == 1 else AllToAllDispatcher(placement, groups)


class ExpertStack:
    """The parameters of one layer's experts, whose dimension 0 counts this rank's slots.

    Our `MoE` has one, and so has every foreign module that the engine prepares, as its `expert_stack`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], placement: ExpertPlacement, groups: ExpertGroups):
        self.parameters, self.groups = dict(parameters), groups
        self.dispatcher = make_dispatcher(placement, groups)
        self.log = RoutingLog(placement.num_experts, groups)
        self.node_of_peer: Tensor | None = None
        """The node of each rank of the EP group; None unless `count_crossings` was called."""
        self._mark()

    @property
    def placement(self) -> ExpertPlacement:
        return self.dispatcher.placement

    @property
    def slots(self) -> int:
        """Rows of each parameter on this rank."""
        return len(self.placement.slots[self.groups.ep_rank])

    @property
    def num_experts(self) -> int:
        return self.placement.num_experts

    def place(self, new: ExpertPlacement) -> None:
        """Say that experts live where `new` says, once their rows are there: see `toolkit.moe.migrate`."""
        if new.slots_per_rank != self.placement.slots_per_rank:
            raise ValueError(f"placements of a layer have the same slots: not\n{new}\nafter\n{self.placement}")
        self.dispatcher.place(new)
        self._mark()

    def record(
        self,
        plan: DispatchPlan,
        choices: Choices,
        inputs: Tensor,
        outputs: Tensor,
        *,
        training: bool,
        dropped_E: Tensor | None = None,
    ) -> None:
        """Write the forward that `plan` dispatched into the log; one that is not `training` only as `last_load_E`.

        `inputs` (..., D) were dispatched, `outputs` (..., D) are what came of them. `dropped_E`: assignments that a
        capacity dropped, which are not in `plan.load_E`.
        """
        load_E = plan.load_E if dropped_E is None else plan.load_E + dropped_E
        self.log.last_load_E = load_E
        if not training:
            return
        crossed = None
        if self.node_of_peer is not None:
            self.node_of_peer = self.node_of_peer.to(load_E.device)
            crossed = crossings(plan.order, self.node_of_peer, here=self.groups.ep_rank)
        row_bytes = RowBytes(_row_bytes(inputs), _row_bytes(outputs))
        self.log.add(RoutedForward(self.placement, load_E, dropped_E, crossed, row_bytes, choices))

    def count_crossings(self, node_of_peer: Sequence[int]) -> None:
        """From now on count how many other nodes each token visits, given the node of each rank of the EP group."""
        self.node_of_peer = torch.tensor(node_of_peer).unique(return_inverse=True)[1]

    def _mark(self) -> None:
        placement, here = self.placement, self.groups.ep_rank
        for parameter in self.parameters.values():
            mark_owned(
                parameter,
                row_ids=placement.slots[here],
                groups=self.groups,
                rows_of_ranks=placement.slots if placement.has_replicas else None,
            )


def crossings(order: SlotOrder, node_of_peer_P: Tensor, *, here: int) -> Tensor:
    """int64 (): distinct pairs of a token and a node other than that of peer `here` among the copies that were sent.

    What would cross between nodes if a token that several experts of one node want went there once.
    `node_of_peer_P`: int64, numbered from 0. No host sync.
    """
    peers = len(node_of_peer_P)
    end_P = order.rows_per_slot.view(peers, -1).sum(1).cumsum(0)
    # A dropped copy may stand behind all others, or be said to stand at place 0: it stays at home.
    peer_TK = torch.searchsorted(end_P, order.place_TK, right=True).clamp(max=peers - 1)
    if order.kept_TK is not None:
        peer_TK = peer_TK.where(order.kept_TK, here)
    node_TK = node_of_peer_P[peer_TK]
    # As many columns as there may be nodes: to ask for their number would wait for the device.
    visits_TN = torch.zeros(len(node_TK), peers, dtype=torch.bool, device=node_TK.device).scatter_(1, node_TK, True)
    return visits_TN.sum() - visits_TN.index_select(1, node_of_peer_P[here : here + 1]).sum()


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[-1] * rows.element_size()


def expert_stacks(model: nn.Module) -> dict[str, ExpertStack]:
    """The expert stacks of `model` by the name of their layer, in the order of its modules."""
    stacks: dict[str, ExpertStack] = {}
    for name, module in model.named_modules():
        stack = getattr(module, "expert_stack", None)
        if isinstance(stack, ExpertStack):
            stacks[name] = stack
    return stacks
