"""The MoE layer of a config."""

from __future__ import annotations

from torch import nn

from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.run.config.experts import MoERunConfig


def moe_from_config(
    config: MoERunConfig, dim: int, *, groups: ExpertGroups, shared_expert: nn.Module | None = None
) -> MoE:
    """Return the MoE layer of width `dim` that the config describes."""
    return make_moe(
        dim,
        config.expert_hidden_size,
        config.experts,
        config.top_k,
        groups=groups,
        placement=config.initial_placement,
        spare_slots=config.spare_slots,
        shared_expert=shared_expert,
        capacity_factor=config.capacity_factor,
        recompute=config.recompute,
        router=config.router_options,
        seed=config.seed,
    )
