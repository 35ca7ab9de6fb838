"""The usual callbacks of a recipe with mixtures of experts. A recipe that wants others lists its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from toolkit.callbacks.base import Callback
from toolkit.domains.continual.replay import Remember
from toolkit.data.replay_memory import ReplayMemory
from toolkit.config.experts import LivingRunConfig, MoERunConfig
from toolkit.moe.balance import BiasBalancing, WholeStepBalance
from toolkit.moe.load.expert_load import ExpertLoad
from toolkit.moe.lifecycle.callback import Lifecycle
from toolkit.moe.lifecycle.report import PopulationReport
from toolkit.moe.lifecycle.probe import ScoresSamples
from toolkit.moe.losses import RouterPenalty
from toolkit.moe.replan import Replan
from toolkit.lab.traces import TraceRecorder

if TYPE_CHECKING:
    from toolkit.data.table import TensorTable


def expert_callbacks(model: nn.Module, config: MoERunConfig, penalty: RouterPenalty) -> list[Callback]:
    """Balance, metrics, traces and placement, as `config` says."""
    return [
        WholeStepBalance(penalty),
        BiasBalancing(model),
        ExpertLoad(model),
        TraceRecorder(model, enabled=config.record_traces),
        Replan(model, planner=config.planner, every=config.replan_every, guarded=config.guard),
    ]


def life_callbacks(
    model: nn.Module,
    config: LivingRunConfig,
    penalty: RouterPenalty,
    task: ScoresSamples,
    table: TensorTable,
    *,
    num_classes: int,
) -> list[Callback]:
    """A memory of `table`, the lives of experts, and the report on them, where `config` has room for more experts."""
    if config.max_experts is None:
        return []
    memory = ReplayMemory(table, config.life.memory_size, seed=config.seed)
    life = Lifecycle(
        model,
        task,
        memory,
        config.life,
        min_experts=config.min_experts,
        balance=WholeStepBalance(penalty),
        seed=config.seed,
    )
    report = PopulationReport(
        model, num_classes=num_classes, life=life, edge_decay=config.life.edge_decay, edge_floor=config.life.edge_floor
    )
    if config.life.graph:
        life.knowledge = report
    return [Remember(memory), life, report]
