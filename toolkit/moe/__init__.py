"""Mixture-of-experts layers whose experts are owned by ranks."""

from toolkit.moe.balance import BiasBalancing, WholeStepBalance
from toolkit.moe.capacity import Capacity
from toolkit.moe.engine import ExpertParallel
from toolkit.moe.expert_load import ExpertLoad
from toolkit.moe.layer import MoE, describe_experts, make_moe, moe_layers
from toolkit.moe.losses import RouterPenalty
from toolkit.moe.placement import ExpertPlacement, contiguous
from toolkit.moe.replan import Replan
from toolkit.moe.router import ExpertChoiceRouter, TopKRouter
from toolkit.moe.spread import spread_experts
from toolkit.moe.traces import TraceRecorder

__all__ = [
    "BiasBalancing",
    "Capacity",
    "ExpertChoiceRouter",
    "ExpertLoad",
    "ExpertParallel",
    "ExpertPlacement",
    "MoE",
    "Replan",
    "RouterPenalty",
    "TopKRouter",
    "TraceRecorder",
    "WholeStepBalance",
    "contiguous",
    "describe_experts",
    "make_moe",
    "moe_layers",
    "spread_experts",
]
