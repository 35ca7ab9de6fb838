"""Mixture-of-experts layers whose experts are owned by ranks."""

from toolkit.moe.balance import BiasBalancing, ExpertLoad, WholeStepBalance
from toolkit.moe.layer import MoE, describe_experts, make_moe, moe_layers
from toolkit.moe.losses import RouterPenalty
from toolkit.moe.placement import ExpertPlacement, contiguous
from toolkit.moe.router import TopKRouter

__all__ = [
    "BiasBalancing",
    "ExpertLoad",
    "ExpertPlacement",
    "MoE",
    "RouterPenalty",
    "TopKRouter",
    "WholeStepBalance",
    "contiguous",
    "describe_experts",
    "make_moe",
    "moe_layers",
]
