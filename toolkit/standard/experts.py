"""The usual callbacks of a model with mixture-of-experts layers. A recipe with other needs lists its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from toolkit.callbacks.base import Callback
from toolkit.config.experts import DynamicRunConfig, MoERunConfig
from toolkit.data.replay_memory import ReplayMemory
from toolkit.domains.continual.replay import Remember
from toolkit.lab.traces import TraceRecorder
from toolkit.moe.balance import BiasBalancing, WholeStepBalance
from toolkit.moe.layer import MoE, make_moe
from toolkit.moe.lifecycle.callback import Lifecycle
from toolkit.moe.lifecycle.layer import make_dynamic_moe
from toolkit.moe.lifecycle.probe import ScoresSamples
from toolkit.moe.lifecycle.report import LifecycleReport
from toolkit.moe.load.expert_load import ExpertLoad
from toolkit.moe.losses import RouterPenalty
from toolkit.moe.replan import Replan
from toolkit.parallel.groups import ExpertGroups

if TYPE_CHECKING:
    from toolkit.data.table import TensorTable


def moe_from_config(
    config: MoERunConfig, dim: int, *, groups: ExpertGroups, shared_expert: nn.Module | None = None
) -> MoE:
    """The layer that the flags describe, of width `dim`: with dynamic experts where `config` has `max_experts`."""
    make: Callable[..., MoE] = partial(make_moe, placement=config.initial_placement, spare_slots=config.spare_slots)
    if isinstance(config, DynamicRunConfig) and config.max_experts is not None:
        make = partial(make_dynamic_moe, max_experts=config.max_experts)
    return make(
        dim,
        config.expert_hidden_size,
        config.experts,
        config.top_k,
        groups=groups,
        shared_expert=shared_expert,
        capacity_factor=config.capacity_factor,
        drop_policy=config.drop_policy,
        recompute=config.recompute,
        router=config.router_options,
        seed=config.seed,
    )


def expert_callbacks(model: nn.Module, config: MoERunConfig, penalty: RouterPenalty) -> list[Callback]:
    """Load balancing, metrics, traces and placement, from `config`."""
    return [
        WholeStepBalance(penalty),
        BiasBalancing(model),
        ExpertLoad(model),
        TraceRecorder(model, enabled=config.record_traces),
        Replan.from_config(model, config),
    ]


def lifecycle_callbacks(
    model: nn.Module,
    config: DynamicRunConfig,
    penalty: RouterPenalty,
    task: ScoresSamples,
    table: TensorTable,
    *,
    num_classes: int,
) -> list[Callback]:
    """Dynamic experts: a replay memory of `table`, `Lifecycle` and its report. Empty without `config.max_experts`."""
    if config.max_experts is None:
        return []
    memory = ReplayMemory(table, config.lifecycle.memory_size, seed=config.seed)
    lifecycle = Lifecycle(
        model,
        task,
        memory,
        config.lifecycle,
        min_experts=config.min_experts,
        balance=WholeStepBalance(penalty),
        seed=config.seed,
    )
    report = LifecycleReport(
        model,
        num_classes=num_classes,
        lifecycle=lifecycle,
        edge_decay=config.lifecycle.edge_decay,
        edge_floor=config.lifecycle.edge_floor,
    )
    if config.lifecycle.graph:
        lifecycle.knowledge = report
    return [Remember(memory), lifecycle, report]
