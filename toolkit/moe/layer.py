"""The mixture-of-experts layer: route, dispatch, compute, combine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from toolkit.moe.experts import Activation, GroupedExperts
from toolkit.moe.placement import ExpertPlacement, contiguous
from toolkit.moe.router import Routing, TopKRouter
from toolkit.moe.stack import ExpertStack
from toolkit.parallel import ShardGroups


class MoE(nn.Module):
    """Each token is the weighted sum of its K experts' outputs, plus a shared expert's where there is one.

    The forward is a collective where experts are spread over ranks: every rank calls it equally often, with any
    number of tokens, zero included.
    """

    def __init__(
        self,
        router: TopKRouter,
        experts: GroupedExperts,
        expert_stack: ExpertStack,
        shared_expert: nn.Module | None = None,
    ):
        super().__init__()
        self.router, self.experts, self.expert_stack, self.shared_expert = router, experts, expert_stack, shared_expert
        self.routing: Routing | None = None
        """The last forward's routing, for the losses that need it."""

    @property
    def placement(self) -> ExpertPlacement:
        """Where the experts live."""
        return self.expert_stack.placement

    @property
    def load_E(self) -> Tensor:
        """Routed copies per expert on this rank over all training forwards."""
        return self.expert_stack.load_E

    @property
    def last_load_E(self) -> Tensor:
        """The same, of the last forward alone."""
        return self.expert_stack.last_load_E

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.router(x_TD)
        rows, plan = self.expert_stack.dispatcher.dispatch(x_TD, routing.expert_ids_TK)
        rows = self.experts(rows, plan.rows_per_slot)
        y_TD = self.expert_stack.dispatcher.combine(rows, plan, routing.weights_TK)
        if self.shared_expert is not None:
            y_TD = y_TD + self.shared_expert(x_TD)
        self.record(routing, plan.load_E)
        return y_TD.view(x.shape)

    def record(self, routing: Routing, load_E: Tensor) -> None:
        """Remember what the losses and statistics need."""
        self.routing = routing
        self.expert_stack.count(load_E, training=self.training and torch.is_grad_enabled())


def make_moe(
    dim: int,
    hidden_dim: int,
    num_experts: int,
    top_k: int,
    *,
    groups: ShardGroups | None = None,
    placement: ExpertPlacement | None = None,
    activation: Activation = "relu",
    bias_balancing: bool = False,
    shared_expert: nn.Module | None = None,
    seed: int = 0,
) -> MoE:
    """A layer whose experts live on the ranks of `groups` where `placement` says; None deals out equal blocks."""
    groups = groups or ShardGroups()
    placement = placement or contiguous(num_experts, groups.ep_size)
    if placement.num_experts != num_experts:
        raise ValueError(f"a placement of {placement.num_experts} experts for a layer of {num_experts}")
    experts = GroupedExperts(
        dim,
        hidden_dim,
        expert_ids=placement.experts_on(groups.ep_rank),
        activation=activation,
        seed=seed,
    )
    router = TopKRouter(dim, num_experts, top_k, bias_balancing=bias_balancing)
    stack = ExpertStack({"up": experts.up, "down": experts.down}, placement, groups)
    return MoE(router, experts, stack, shared_expert)


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers of `model` by name, in the order of its modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def describe_experts(model: nn.Module, groups: ShardGroups) -> dict[str, Any]:
    """Facts about the mixture for a run's record: how experts are spread, and where each one lives."""
    layers = moe_layers(model)
    placement = {
        name: [layer.placement.experts_on(rank) for rank in range(groups.ep_size)] for name, layer in layers.items()
    }
    return {"ep_size": groups.ep_size, "expert_placement": placement}
