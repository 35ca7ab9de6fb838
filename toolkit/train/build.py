"""What a config makes: a `Trainer` with the usual callbacks. For other choices construct `Trainer` yourself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from toolkit.data.batches import Augment, AugmentedTable, EvalBatches, Order, TrainBatches
from toolkit.data.loader import (
    AnyEvalBatches,
    LoaderBatches,
    LoaderEvalBatches,
    Look,
    known_length,
    make_loader,
    refuse_columns,
)
from toolkit.data.replay_memory import ReplayMemory
from toolkit.data.table import TensorTable
from toolkit.dynamic.callback import Lifecycle
from toolkit.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.dynamic.remember import Remember
from toolkit.dynamic.report import LifecycleReport
from toolkit.errors import UserError
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import MoE, describe_experts, make_moe
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.parallel.dense import OF_EACH_PROCESS, has_batch_norm
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.run.config.experts import DynamicRunConfig, ExpertRunConfig, MoERunConfig
from toolkit.run.run import Run
from toolkit.train.batch_size import SmallerMicroBatches, accumulation_steps
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.early_stopping import EarlyStopping
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.callbacks.expert_balance import BiasBalancing, WholeStepBalance
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.callbacks.pictures import Pictures
from toolkit.train.callbacks.preemption import Preemption
from toolkit.train.callbacks.progress import Progress
from toolkit.train.callbacks.replan import Replan
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.callbacks.trace_recorder import TraceRecorder
from toolkit.train.callbacks.watchdog import Watchdog
from toolkit.train.device_use import DeviceUse
from toolkit.train.optim import Scheduler, build_schedule, warmup_steps
from toolkit.train.profile import Profile
from toolkit.train.start import describe_start, print_idle_settings
from toolkit.train.task import Task
from toolkit.train.tasks.classification import Classification
from toolkit.train.tasks.language_modeling import LanguageModeling
from toolkit.train.trainer import Trainer

EVAL_BATCH_SIZE = 1000
"""Samples per forward pass of an evaluation, over all ranks."""


class HasSplits(Protocol):
    """Data of a run, as `load_images` gives them, or `Splits` of one's own."""

    @property
    def train(self) -> Any:
        """Is trained on."""
        ...

    @property
    def test(self) -> Any:
        """Is evaluated on."""
        ...


class Splits(NamedTuple):
    """Tables, data sets or DataLoaders of one's own."""

    train: TensorTable | Dataset[Any] | Iterable[Any]
    test: TensorTable | Dataset[Any] | Iterable[Any] | None = None
    validation: TensorTable | Dataset[Any] | Iterable[Any] | None = None


def fit(
    run: Run,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: HasSplits,
    *,
    schedule: Scheduler | None = None,
    schedule_metric: str | None = None,
    augment: Augment | None = None,
    order: Order | None = None,
    evaluation: Callback | None = None,
    callbacks: Sequence[Callback] = (),
    eval_batch_size: int = EVAL_BATCH_SIZE,
) -> dict[str, Any]:
    """Trains `model` as the run's config says, and ends the run: what a recipe's `main` returns.

    The name of `data` goes to the run's facts. With a config of experts, the penalty and the callbacks of experts come
    from the config and from what the model holds, see `expert_callbacks`.

    Args:
        run: What `start_run` gave.
        task: Says what a loss is.
        model: As the recipe built it.
        optimizer: The recipe's, of any kind that treats each row of experts by itself.
        data: Has `train` and `test`, and may have `validation`: tables, data sets or DataLoaders.
        schedule: A scheduler that was made for `optimizer`, in place of the config's.
        schedule_metric: See `Trainer`.
        augment: See `standard_trainer`, as for the others.
        order: Replaces the random permutation of each epoch.
        evaluation: A callback in place of `data.test`.
        callbacks: Run before the usual ones.
        eval_batch_size: Samples per forward pass of an evaluation, over all ranks.

    Returns:
        The run's final numbers.

    Raises:
        UserError: As `standard_trainer` does.
    """
    if (name := getattr(data, "name", None)) is not None:
        run.describe(dataset=name, dataset_notice=getattr(data, "notice", None))
    trainer = standard_trainer(
        run,
        task,
        model,
        optimizer,
        train=data.train,
        test=data.test if evaluation is None else None,
        validation=getattr(data, "validation", None) if evaluation is None else None,
        schedule=schedule,
        schedule_metric=schedule_metric,
        augment=augment,
        order=order,
        evaluation=evaluation,
        callbacks=callbacks,
        num_classes=getattr(data, "num_classes", None),
        eval_batch_size=eval_batch_size,
    )
    return run.finish(trainer.fit())


def standard_trainer(
    run: Run,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    train: TensorTable | Dataset[Any] | Iterable[Any],
    test: TensorTable | Dataset[Any] | Iterable[Any] | None = None,
    validation: TensorTable | Dataset[Any] | Iterable[Any] | None = None,
    steps_per_epoch: int | None = None,
    augment: Augment | None = None,
    order: Order | None = None,
    max_steps: int | None = None,
    evaluation: Callback | None = None,
    more_evaluations: Sequence[Evaluation] = (),
    eval_at_start: bool = False,
    callbacks: Sequence[Callback] = (),
    num_classes: int | None = None,
    eval_batch_size: int = EVAL_BATCH_SIZE,
    schedule: Scheduler | None = None,
    schedule_metric: str | None = None,
) -> Trainer:
    """Returns the trainer that the config asks for: it evaluates, saves each epoch, resumes, and can be preempted.

    Args:
        run: What `start_run` gave.
        task: Says what a loss is.
        model: As the recipe built it.
        optimizer: The recipe's, of any kind that treats each row of experts by itself.
        train: A table; or a data set or a DataLoader that gives global batches: dicts of tensors with a row per sample,
            or pairs, which become the columns `input` and `label`.
        test: The same, to evaluate on; None with `evaluation`.
        validation: The same, to choose by: early stopping goes by it, and by `test` where there is none.
        steps_per_epoch: Of a DataLoader, by default the number of its batches; where that is not known, the run ends at
            the config's `max_steps` and counts as one epoch.
        augment: Changes training batches, and what is replayed from a memory: `toolkit.data.visit_draws.BlankPixels`.
        order: Replaces the random permutation of each epoch.
        max_steps: Replaces the config's number of epochs.
        evaluation: A callback in place of `test`, such as one over a stream of tasks; it is to heed the config's
            `eval_every_steps` where it has `every_steps`.
        more_evaluations: Are of further data sets.
        eval_at_start: Evaluates `test` before the first step, too.
        callbacks: Run before the usual ones, so that what they record is on the line of metrics that is printed.
        num_classes: The classes of `train`, for the callbacks of experts: see `expert_callbacks`.
        eval_batch_size: Samples per forward pass of an evaluation, over all ranks.
        schedule: A scheduler that was made for `optimizer`, in place of the config's.
        schedule_metric: See `Trainer`.

    Raises:
        ValueError: Unless either `test` or `evaluation` is given.
        UserError: For early stopping without `test`, for experts that are in other groups than the config asks for, and
            for data without samples.
    """
    config = run.config
    if (test is None) == (evaluation is None):
        raise ValueError("give either `test`, a table, or `evaluation`, a callback")
    if test is None and config.early_stopping.patience is not None:
        remedy = "this run has no single test set, leave it out"
        raise UserError(field="early_stopping.patience", value=config.early_stopping.patience, remedy=remedy)
    for which, data in (("training", train), ("test", test), ("validation", validation)):
        if data is None:
            continue
        refuse_columns(which, data)
        if known_length(data) == 0:
            why = " or leave out its drop_last" if isinstance(data, DataLoader) else ""
            raise UserError(f"the {which} data give no batches: pass a data set with samples{why}.")
    if isinstance(task, Classification):
        tables = {
            name: table
            for name, table in (("training", train), ("test", test), ("validation", validation))
            if isinstance(table, TensorTable)
        }
        for name, table in tables.items() if _reads_known_columns(task) else ():
            as_in_batches = AugmentedTable(table, augment) if augment and name == "training" else table
            task.check_columns(as_in_batches[torch.arange(1)])
        task.expect({name: table.columns["label"] for name, table in tables.items() if "label" in table.columns})
        task.may_ignore |= augment is not None  # which may change labels
    _check_experts(run, model)
    if isinstance(config, ExpertRunConfig):
        run.describe(**describe_experts(model, run.expert_groups))
    batches: TrainBatches | LoaderBatches
    if isinstance(train, TensorTable):
        batches = _table_batches(run, train, augment, order)
        samples = f"{len(train):,} training samples"
    else:
        if augment is not None or order is not None:
            raise ValueError("`augment` and `order` are for a TensorTable: change or order samples in the DataLoader")
        batches = _loader_batches(run, train, steps_per_epoch, max_steps, _look(task, "training"))
        samples = "batches of unknown number" if batches.endless else f"{batches.steps_per_epoch:,} batches an epoch"
    every_steps = config.eval_every_steps or config.eval_every * batches.steps_per_epoch
    if test is not None:
        evaluation = Evaluation(
            eval_batches(run, test, eval_batch_size, _look(task, "test")), every_steps, at_start=eval_at_start
        )
    assert evaluation is not None
    if validation is not None:
        chosen_by = eval_batches(run, validation, eval_batch_size, _look(task, "validation"))
        more_evaluations = [*more_evaluations, Evaluation(chosen_by, every_steps, name="validation")]
    elif config.validates:
        run.print("no validation data: what is chosen, such as the end of training, is chosen by the test data.")
    max_steps = max_steps or config.epochs * batches.steps_per_epoch
    if config.max_steps is not None:
        max_steps = min(max_steps, config.max_steps)
    of_experts = expert_callbacks(run, model, task, callbacks, steps=max_steps, train=train, num_classes=num_classes)
    print_idle_settings(
        run,
        model,
        own_loader=isinstance(train, DataLoader),
        own_schedule=schedule is not None,
        own_evaluation=evaluation if test is None else None,
        endless=isinstance(batches, LoaderBatches) and batches.endless,
        warmup_steps=warmup_steps(config.schedule, batches.steps_per_epoch),
        max_steps=max_steps,
    )
    _announce(run, model, samples, max_steps, epochs=max_steps / batches.steps_per_epoch)
    model = with_batch_norm(run, model)
    if config.compile:
        model.compile()
    throughput = Throughput()
    return Trainer(
        run,
        task,
        model,
        optimizer,
        batches,
        max_steps=max_steps,
        schedule=schedule
        or build_schedule(config.schedule, max_steps=max_steps, steps_per_epoch=batches.steps_per_epoch),
        schedule_metric=schedule_metric,
        max_grad_norm=config.optimizer.max_grad_norm,
        log_every=config.log_every,
        callbacks=[
            Watchdog(limit_s=config.step_timeout, longest_s=60 * config.process_timeout),
            *callbacks,
            *of_experts,
            throughput,
            DeviceUse(throughput, peak_flops=config.peak_flops),
            evaluation,
            *more_evaluations,
            Checkpointing(config.checkpoint),
            *([Profile()] if config.profile else []),
            EarlyStopping(config.early_stopping, "eval" if validation is None else "validation"),
            Preemption(),
            Pictures(),
            Progress(),
            SmallerMicroBatches(),
        ],
    )


def _table_batches(run: Run, table: TensorTable, augment: Augment | None, order: Order | None) -> TrainBatches:
    config = run.config
    return TrainBatches(
        table,
        batch_size=config.batch_size,
        seed=config.seed,
        accumulation=accumulation_steps(run),
        augment=augment,
        order=order,
        rank=run.rank,
        world_size=run.world_size,
        device=run.device,
        num_workers=config.num_workers,
    )


def _look(task: Task, name: str) -> Look | None:
    """Returns what is called with each global batch of a DataLoader of the `name` data."""
    return partial(task.expect_batch, name) if _reads_known_columns(task) else None


def _reads_known_columns(task: Task) -> TypeGuard[Classification]:
    """Whether `task` reads its `inputs` and `label`: a subclass may read others."""
    return type(task) is Classification


def _loader_batches(
    run: Run, data: Any, steps_per_epoch: int | None, max_steps: int | None, look: Look | None
) -> LoaderBatches:
    config = run.config
    loader = make_loader(data, batch_size=config.batch_size, num_workers=config.num_workers, shuffle=True)
    known = steps_per_epoch or known_length(loader)
    whole = known or max_steps or config.max_steps
    if whole is None:
        remedy = "nobody knows how many batches the training data have: give it, or steps_per_epoch"
        raise UserError(field="max_steps", remedy=remedy)
    return LoaderBatches(
        loader,
        steps_per_epoch=whole,
        endless=known is None,
        seed=config.seed,
        accumulation=accumulation_steps(run),
        rank=run.rank,
        world_size=run.world_size,
        device=run.device,
        look=look,
    )


def _announce(run: Run, model: nn.Module, samples: str, max_steps: int, epochs: float) -> None:
    """Record and print what is trained, on what and how long; `samples` are those of training, in words."""
    config = run.config
    run.describe(effective_batch_size=config.batch_size, peak_learning_rate=config.peak_lr)
    if config.scale_lr is not None:
        scaled = f"{config.peak_lr:g}, from {config.lr:g} for {config.scale_lr} samples"
        run.print(f"learning rate {scaled}: the effective batch is {config.batch_size}")
    name = run.facts.get("dataset")
    steps = f"{max_steps:,} of {config.batch_size:,} samples, {epochs:.4g} epoch(s)"
    run.print(describe_start(run, model, data=f"{name}, {samples}" if name else samples, steps=steps))


def with_batch_norm(run: Run, model: nn.Module) -> nn.Module:
    """Returns `model` with the batch norm that the config asks for; on several processes, says where it differs from
    that of one. Raises UserError on a CPU."""
    if run.world_size == 1 or not has_batch_norm(model):
        return model
    if not run.config.sync_bn:
        run.note(f"{OF_EACH_PROCESS}sync_bn=True has it over all")
        return model
    if run.device.type == "cpu":
        raise UserError(field="sync_bn", value=True, remedy="torch has no SyncBatchNorm on a CPU: leave it out")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def eval_batches(run: Run, test: Any, batch_size: int, look: Look | None = None) -> AnyEvalBatches:
    """Returns the batches of a table, a data set or a DataLoader, `batch_size` samples over all ranks; `look` is called
    with each global batch of the latter two. Raises UserError for a generator."""
    if isinstance(test, Iterator):
        raise UserError(
            "the test data are a generator, which is empty after one evaluation: pass a data set or a list."
        )
    where = {"rank": run.rank, "world_size": run.world_size, "device": run.device}
    if isinstance(test, TensorTable):
        return EvalBatches(test, batch_size=batch_size, num_workers=run.config.num_workers, **where)
    size = test.batch_size or batch_size if isinstance(test, DataLoader) else batch_size
    loader = make_loader(test, batch_size=size, num_workers=run.config.num_workers, shuffle=False)
    return LoaderEvalBatches(loader, seed=run.config.seed, look=look, **where)


# --- experts -------------------------------------------------------------------------------------------------------


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


def expert_callbacks(
    run: Run,
    model: nn.Module,
    task: Task,
    given: Sequence[Callback] = (),
    *,
    steps: int,
    train: Any = None,
    num_classes: int | None = None,
) -> list[Callback]:
    """Returns what the config asks for of the experts in `model`: balancing, load metrics, traces, moves, growth.

    A task that has room for a penalty and none gets one, where the layers are ours.

    Args:
        run: Its config is of experts; otherwise nothing is needed.
        model: Holds the experts.
        task: Gets the balance loss as its `penalty`.
        given: The recipe's own: one of a kind takes the place of ours.
        steps: The optimizer steps of the run.
        train: For dynamic experts, a table of labelled samples.
        num_classes: Its classes.

    Raises:
        UserError: For dynamic experts without a table of labelled samples.
    """
    config = run.config
    if not isinstance(config, ExpertRunConfig):
        return []
    stacks = list(expert_stacks(model).values())
    callbacks: list[Callback] = []
    if isinstance(config, MoERunConfig) and isinstance(task, Classification | LanguageModeling):
        if task.penalty is None:
            task.penalty = RouterPenalty(
                model,
                balance_weight=config.balance_weight_in(steps),
                z_weight=config.z_weight,
                balance_scope=config.balance_scope,
            )
            if (weight := task.penalty.balance_weight) > config.balance_weight:
                run.print(f"the balance loss has the weight {weight:.2g}, because the run has {steps:,} steps only")
        if isinstance(task.penalty, RouterPenalty):
            callbacks.append(WholeStepBalance(task.penalty))
        callbacks.append(BiasBalancing(model))
    if not stacks:
        return callbacks
    if config.record_traces:
        callbacks.append(TraceRecorder(model))
    if config.replan.planner:
        callbacks.append(Replan(model, config.replan))
    has_lifecycle = any(isinstance(callback, Lifecycle) for callback in given)
    if isinstance(config, DynamicRunConfig) and config.max_experts is not None and not has_lifecycle:
        callbacks += lifecycle_callbacks(config, model, task, train, num_classes)
    callbacks.append(ExpertLoad(model))  # which does not judge experts that were pruned in this step
    kinds = {type(callback) for callback in given}
    return [callback for callback in callbacks if type(callback) not in kinds]


def lifecycle_callbacks(
    config: DynamicRunConfig, model: nn.Module, task: Any, table: Any, num_classes: int | None
) -> list[Callback]:
    """Returns a replay memory of the training table, `Lifecycle` and its report."""
    if not isinstance(table, TensorTable) or num_classes is None or not hasattr(task, "sample_losses"):
        remedy = "dynamic experts need a table of labelled samples and a task with `sample_losses`: leave it out"
        raise UserError(field="max_experts", value=config.max_experts, remedy=remedy)
    memory = ReplayMemory(table, config.lifecycle.memory_size, seed=config.seed)
    lifecycle = Lifecycle(
        model,
        task,
        memory,
        config.lifecycle,
        min_experts=config.min_experts,
        balance=WholeStepBalance(task.penalty),
    )
    report = LifecycleReport(model, num_classes=num_classes, lifecycle=lifecycle)
    if config.lifecycle.graph:
        lifecycle.knowledge = report
    return [Remember(memory), lifecycle, report]


def _check_experts(run: Run, model: nn.Module) -> None:
    """Raises UserError where experts are in other groups, or have other slots, than the config asks for."""
    stacks = list(expert_stacks(model).values())
    config = run.config
    if not isinstance(config, ExpertRunConfig) or not stacks or run.world_size == 1:
        return
    built, wanted = stacks[0].groups, run.expert_groups
    compared = attrgetter("ep_groups", "nodes")
    if compared(built) != compared(wanted):
        remedy = f"the model's experts are on {built.ep_size} processes: build it with run.expert_groups"
        raise UserError(field="ep_size", value=wanted.ep_size, remedy=remedy)
    if built.ep_size > 1 and config.spare_slots and not any(stack.placement.empty_slots for stack in stacks):
        remedy = "the model has none: build it with tk.moe_from_config, or leave the setting out"
        raise UserError(field="spare_slots", value=config.spare_slots, remedy=remedy)
