"""The usual callbacks of a model with mixture-of-experts layers. A recipe with other needs lists its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from toolkit.data.replay_memory import ReplayMemory
from toolkit.errors import UserError
from toolkit.experts.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.stack import ExpertStack, expert_stacks
from toolkit.experts.parallel.groups import ExpertGroups, strided_partition
from toolkit.experts.parallel.parallel_options import DDPOptions
from toolkit.run.config.experts import DynamicRunConfig, ExpertRunConfig, MoERunConfig
from toolkit.run.run import Run
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.expert_balance import BiasBalancing, WholeStepBalance
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.callbacks.lifecycle import Lifecycle, ScoresSamples
from toolkit.train.callbacks.lifecycle_report import LifecycleReport
from toolkit.train.callbacks.remember import Remember
from toolkit.train.callbacks.replan import Replan
from toolkit.train.callbacks.trace_recorder import TraceRecorder
from toolkit.train.task import Task
from toolkit.train.tasks.classification import Classification
from toolkit.train.tasks.language_modeling import LanguageModeling

if TYPE_CHECKING:
    from toolkit.data.table import TensorTable


def moe_from_config(
    config: MoERunConfig, dim: int, *, groups: ExpertGroups, shared_expert: nn.Module | None = None
) -> MoE:
    """The layer that the flags describe, of width `dim`: with dynamic experts where `config` has `max_experts`."""
    placement = config.initial_placement or "contiguous"
    make: Callable[..., MoE] = partial(make_moe, placement=placement, spare_slots=config.spare_slots)
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
        Replan(model, config.replan),
    ]


def missing_expert_callbacks(run: Run, model: nn.Module, task: Task, callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks of experts that `callbacks` lack: load metrics, traces and replanning.

    Prints one line for each setting that does nothing in this run. Raises UserError where `model` has all experts on
    every process, or no spare slots, and the config says otherwise.
    """
    config = run.config
    stacks = list(expert_stacks(model).values())
    _print_idle_parallel_settings(run)
    if not isinstance(config, ExpertRunConfig) or not stacks:
        return []
    _check_experts_are_as_configured(run, config, stacks)
    _print_idle_expert_settings(run, config, task, stacks)

    def lacks(kind: type[Callback]) -> bool:
        return not any(isinstance(callback, kind) for callback in callbacks)

    if isinstance(config, DynamicRunConfig) and config.max_experts is not None and lacks(Lifecycle):
        raise UserError(
            f"--max-experts {config.max_experts}: nothing in this recipe changes experts: add tk.lifecycle_callbacks "
            "to its callbacks, or leave the flag out."
        )
    missing: list[Callback] = []
    if lacks(ExpertLoad):
        missing.append(ExpertLoad(model))
    if config.record_traces and lacks(TraceRecorder):
        missing.append(TraceRecorder(model))
    if config.replan.planner and lacks(Replan):
        missing.append(Replan(model, config.replan))
    return missing


def _print_idle_parallel_settings(run: Run) -> None:
    """Print a line for each setting of how dense parameters are spread that does nothing in this run."""
    config = run.config
    if run.world_size == 1 and config.dense_parallel != "ddp":
        run.print(f"--dense-parallel {config.dense_parallel}: no effect on one process.")
    if config.fsdp_size is not None and (run.world_size == 1 or config.dense_parallel == "ddp"):
        where = "on one process" if run.world_size == 1 else "without --dense-parallel fsdp2"
        run.print(f"--fsdp-size {config.fsdp_size}: no effect {where}.")
    for name, value in config.ddp.model_dump().items():
        if value != getattr(DDPOptions(), name) and (run.world_size == 1 or config.dense_parallel != "ddp"):
            where = "on one process" if run.world_size == 1 else f"with --dense-parallel {config.dense_parallel}"
            run.print(f"--ddp.{name.replace('_', '-')} {value}: no effect {where}.")


def _check_experts_are_as_configured(run: Run, config: ExpertRunConfig, stacks: Sequence[ExpertStack]) -> None:
    """Raise UserError where the experts in `stacks` are spread, exchanged or stored otherwise than the config says."""
    wanted = config.ep_size_in(run.world_size)
    built, built_in = stacks[0].groups.ep_size, stacks[0].groups.ep_groups
    if built < wanted and run.world_size > 1:
        raise UserError(
            f"--parallel-strategy {config.parallel_strategy}: experts should be on {wanted} processes, and the model "
            f"was built for {built}: build it with groups=tk.experts.make_expert_groups({wanted}), or use data_parallel."
        )
    if config.exchange == "hierarchical" and stacks[0].groups.nodes is None:
        raise UserError(
            "--exchange hierarchical: the model was built for flat: build it with groups=tk.experts.make_expert_groups(..., "
            "exchange=config.exchange)."
        )
    is_spread = run.world_size > 1 and built > 1
    if is_spread and config.dispatch_chunks != stacks[0].groups.chunks:
        raise UserError(
            f"--dispatch-chunks {config.dispatch_chunks}: the model was built for {stacks[0].groups.chunks}: build it "
            "with groups=tk.experts.make_expert_groups(..., dispatch_chunks=config.dispatch_chunks)."
        )
    if is_spread and config.ep_stride > 1 and built_in != strided_partition(run.world_size, built, config.ep_stride):
        raise UserError(
            f"--ep-stride {config.ep_stride}: the model was built for the EP groups "
            f"{', '.join(map(str, built_in))}: build it with groups=tk.experts.make_expert_groups({built}, "
            f"ep_stride={config.ep_stride}), or leave the flag out."
        )
    if built > 1 and config.spare_slots and not any(stack.placement.empty_slots for stack in stacks):
        raise UserError(
            f"--spare-slots {config.spare_slots}: the model has none: build it with tk.moe_from_config, or leave the "
            "flag out."
        )


def _print_idle_expert_settings(run: Run, config: ExpertRunConfig, task: Task, stacks: Sequence[ExpertStack]) -> None:
    """Print a line for each setting of experts that does nothing in this run."""
    if stacks[0].groups.ep_size == 1 and config.replan.planner is not None:
        run.print(f"--replan.planner {config.replan.planner}: no effect, because every process has all experts.")
    for name, usual in (("spare_slots", 0), ("ep_stride", 1), ("dispatch_chunks", 1)):
        if stacks[0].groups.ep_size == 1 and getattr(config, name) != usual:
            flag = "--" + name.replace("_", "-")
            run.print(f"{flag} {getattr(config, name)}: no effect, because every process has all experts.")
    wants_penalty = isinstance(config, MoERunConfig) and config.balance == "loss" and config.balance_weight > 0
    if wants_penalty and isinstance(task, (Classification, LanguageModeling)) and task.penalty is None:
        run.print(
            f"--balance-weight {config.balance_weight:g}: no effect, because the task has no tk.experts.RouterPenalty."
        )


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
