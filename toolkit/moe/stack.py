"""One layer's experts as every host holds them: stacked parameters, their placement, and counts of assignments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from toolkit.moe.dispatch import AllToAllDispatcher, LocalDispatcher, SlotOrder, TokenDispatcher
from toolkit.parallel.groups import ExpertGroups
from toolkit.parallel.ownership import EMPTY_ROW, mark_owned
from toolkit.placement.placement import ExpertPlacement


def make_dispatcher(placement: ExpertPlacement, groups: ExpertGroups) -> TokenDispatcher:
    """The dispatcher for experts on the ranks of `groups`."""
    return LocalDispatcher(placement) if groups.ep_size == 1 else AllToAllDispatcher(placement, groups)


class ExpertStack:
    """The parameters of one layer's experts, whose dimension 0 counts this rank's slots.

    It is the `expert_stack` of our `MoE`, of each foreign module that `spread_experts` or `ExpertParallel` prepared,
    and of each experts module under transformers' own expert parallelism.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], placement: ExpertPlacement, groups: ExpertGroups):
        self._parameters, self.groups = dict(parameters), groups
        self.dispatcher = make_dispatcher(placement, groups)
        # Not buffers: DDP sends rank 0's buffers to everybody, so counters kept there would be overwritten.
        self.load_E = torch.zeros(placement.num_experts, dtype=torch.int64)
        """Routed copies per expert on this rank over all training forwards; never reset, so take differences."""
        self.last_load_E = self.load_E
        """The same, of the last forward alone."""
        self.together_EE: Tensor | None = None
        """float64: how many tokens chose both of two experts, on this rank over all training forwards; None until
        somebody asks for it with `count_together`."""
        self.node_of_peer: Tensor | None = None
        """Where the ranks of the shard group are; None until somebody asks with `count_crossings`."""
        self.last_crossings = torch.zeros((), dtype=torch.int64)
        """Distinct pairs of a token of this rank and another node that has experts of it, in the last training
        forward."""
        self.mark()

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """By name; dimension 0 counts this rank's slots."""
        return self._parameters

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
        """Route by `new`, once the rows are there: `toolkit.moe.migrate` moves them."""
        if new.slots_per_rank != self.placement.slots_per_rank:
            raise ValueError(f"placements of a layer have the same slots: not\n{new}\nafter\n{self.placement}")
        self.dispatcher.place(new)
        self.mark()

    @torch.no_grad()
    def adopt(self, rows_of_ranks: Sequence[Sequence[int]]) -> None:
        """Place experts where a checkpoint has them, before their rows are read, so that nothing has to migrate.

        Where this run has other ranks or slots they stay where they are, and the rows are read from there.
        """
        saved = ExpertPlacement(tuple(tuple(row) for row in rows_of_ranks))
        if saved == self.placement or saved.slots_per_rank != self.placement.slots_per_rank:
            return
        self.place(saved)
        for slot, expert in enumerate(saved.slots[self.groups.ep_rank]):
            if expert == EMPTY_ROW:
                for parameter in self.parameters.values():
                    parameter[slot].zero_()

    def count(
        self,
        order: SlotOrder,
        load_E: Tensor,
        expert_ids_TK: Tensor,
        kept_TK: Tensor | None = None,
        *,
        training: bool,
    ) -> None:
        """Take note of one forward, whose routed copies were sent in `order`."""
        self.last_load_E = load_E
        if not training:
            return
        self.load_E = self.load_E.to(load_E.device) + load_E
        self.last_crossings = self.last_crossings.to(load_E.device)
        if self.node_of_peer is not None:
            self.node_of_peer = self.node_of_peer.to(load_E.device)
            self.last_crossings = crossings(order, self.node_of_peer, here=self.groups.ep_rank)
        if self.together_EE is not None:
            choices_TE = torch.zeros(len(expert_ids_TK), self.num_experts, device=load_E.device)
            chosen_TK = torch.ones_like(expert_ids_TK) if kept_TK is None else kept_TK
            choices_TE.scatter_(1, expert_ids_TK, chosen_TK.to(choices_TE.dtype))
            self.together_EE = self.together_EE.to(load_E.device) + (choices_TE.T @ choices_TE).double()

    def count_together(self) -> None:
        """From now on count which experts are chosen together: one small product per forward."""
        if self.together_EE is None:
            self.together_EE = torch.zeros(self.num_experts, self.num_experts, dtype=torch.float64)

    def count_crossings(self, node_of_peer: Sequence[int]) -> None:
        """From now on count how many other nodes each token visits, given the node of each rank of the shard group."""
        self.node_of_peer = torch.tensor(node_of_peer).unique(return_inverse=True)[1]

    @property
    def storage_groups(self) -> ExpertGroups:
        """The ranks among which rows are stored. Others than `groups` where FSDP shards the experts, too."""
        return self.groups

    def stored(self, placement: ExpertPlacement) -> ExpertPlacement:
        """Which experts each rank of `storage_groups` stores where they are computed as `placement` says."""
        return placement

    def mark(self) -> None:
        """Declare which rows this rank owns, under the ids of their experts."""
        groups, stored = self.storage_groups, self.stored(self.placement)
        for parameter in self.parameters.values():
            mark_owned(
                parameter,
                row_ids=stored.slots[groups.ep_rank],
                groups=groups,
                rows_of_ranks=stored.slots if stored.has_replicas else None,
                holder=self,
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


def expert_stacks(model: nn.Module) -> dict[str, ExpertStack]:
    """The expert stacks of `model` by the name of their layer, in the order of its modules."""
    stacks: dict[str, ExpertStack] = {}
    for name, module in model.named_modules():
        stack = getattr(module, "expert_stack", None)
        if isinstance(stack, ExpertStack):
            stacks[name] = stack
    return stacks
