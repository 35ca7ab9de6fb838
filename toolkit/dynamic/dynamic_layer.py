"""An MoE layer with dynamic experts: logical experts that are inactive at first, and a router that masks them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from toolkit.dynamic.dynamic_router import DynamicRouter
from toolkit.errors import UserError
from toolkit.experts.layer.grouped_experts import Activation
from toolkit.experts.layer.moe_layer import MoE, make_moe, moe_layers
from toolkit.experts.layer.recompute import Recompute
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.groups import ExpertGroups


def make_dynamic_moe(
    dim: int,
    hidden_dim: int,
    num_experts: int,
    top_k: int,
    *,
    max_experts: int,
    groups: ExpertGroups | None = None,
    activation: Activation = "relu",
    shared_expert: nn.Module | None = None,
    capacity_factor: float | None = None,
    recompute: Recompute = "none",
    router: RouterOptions | None = None,
    seed: int = 0,
) -> MoE:
    """Make an MoE layer with dynamic experts: it maps (..., `dim`) to (..., `dim`).

    Experts are placed round-robin, so that ranks have the same number of active experts. Inactive experts have weights
    of zero. The `Lifecycle` callback activates and deactivates experts. See
    `toolkit.experts.layer.moe_layer.make_moe` for the other parameters.

    Args:
        num_experts: The experts that are active at the start, the first of the logical ones.
        top_k: Experts per token.
        max_experts: The number of logical experts.

    Raises:
        UserError: `max_experts` is below `num_experts`, `num_experts` is below `top_k`, dynamic experts do not support
            a router option, or `make_moe` raises it.
    """
    if max_experts < num_experts:
        raise UserError(f"max_experts={max_experts}: is below num_experts={num_experts}. Use that or more.")
    if top_k > num_experts:
        raise UserError(f"top_k={top_k}: is not within the active experts. Use 1 to {num_experts}.")
    layer = make_moe(
        dim,
        hidden_dim,
        max_experts,
        top_k,
        groups=groups,
        placement="round_robin",
        activation=activation,
        shared_expert=shared_expert,
        capacity_factor=capacity_factor,
        recompute=recompute,
        router=router,
        router_type=partial(DynamicRouter, active=num_experts),
        seed=seed,
    )
    inactive = [e >= num_experts for e in layer.placement.slots[layer.expert_stack.groups.ep_rank]]
    with torch.no_grad():
        for weight in layer.expert_stack.parameters.values():
            weight[torch.tensor(inactive)] = 0
    return layer


def dynamic_layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers of `model` with dynamic experts, by name."""
    return {name: layer for name, layer in moe_layers(model).items() if isinstance(layer.router, DynamicRouter)}
