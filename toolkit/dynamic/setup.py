"""Setup of the model and the run of a recipe with dynamic experts."""

from __future__ import annotations

from torch import nn

from toolkit.data.replay_memory import ReplayMemory
from toolkit.data.table import TensorTable
from toolkit.dynamic.callback import Lifecycle, ScoresSamples
from toolkit.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.dynamic.lifecycle_options import DynamicRunConfig
from toolkit.dynamic.remember import Remember
from toolkit.dynamic.report import LifecycleReport
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.train.callbacks.base import Callback
from toolkit.train.models.moe import moe_from_config as fixed_moe_from_config


def moe_from_config(
    config: DynamicRunConfig, dim: int, *, groups: ExpertGroups, shared_expert: nn.Module | None = None
) -> MoE:
    """Return the MoE layer of width `dim` that the config describes, with dynamic experts if it has `max_experts`."""
    if config.max_experts is None:
        return fixed_moe_from_config(config, dim, groups=groups, shared_expert=shared_expert)
    return make_dynamic_moe(
        dim,
        config.expert_hidden_size,
        config.experts,
        config.top_k,
        max_experts=config.max_experts,
        groups=groups,
        shared_expert=shared_expert,
        capacity_factor=config.capacity_factor,
        recompute=config.recompute,
        router=config.router_options,
        seed=config.seed,
    )


def lifecycle_callbacks(
    config: DynamicRunConfig, model: nn.Module, task: ScoresSamples, train: TensorTable, num_classes: int
) -> list[Callback]:
    """Return the callbacks for dynamic experts of `model`: replay buffer of `train`, `Lifecycle` and its report; none
    without `max_experts`."""
    if config.max_experts is None:
        return []
    memory = ReplayMemory(train, config.lifecycle.memory_size, seed=config.seed)
    lifecycle = Lifecycle(model, task, memory, config.lifecycle)
    report = LifecycleReport(model, num_classes=num_classes, lifecycle=lifecycle)
    lifecycle.knowledge = report
    return [Remember(memory), lifecycle, report]
