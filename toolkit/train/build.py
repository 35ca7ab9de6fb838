"""The parts that `fit` derives from a run's config, in order. For other choices make a `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from toolkit.data.batches import Augment, Order, TrainBatches
from toolkit.data.loader import LoaderBatches, known_length, make_loader
from toolkit.data.splits import HasSplits, Samples
from toolkit.data.table import TensorTable
from toolkit.errors import UserError, require_type
from toolkit.experts.layer.losses import RouterPenalty, penalties_of
from toolkit.experts.layer.moe_layer import Experts
from toolkit.run.config.experts import ExpertRunConfig, MoERunConfig
from toolkit.run.run import Run
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.batch_size import SmallerMicroBatches
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.early_stopping import EarlyStopping
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.callbacks.expert_balance import BiasBalancing, WholeStepBalance
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.callbacks.preemption import Preemption
from toolkit.train.callbacks.profile import Profile
from toolkit.train.callbacks.progress import Progress
from toolkit.train.callbacks.replan import Replan
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.callbacks.trace_recorder import TraceRecorder
from toolkit.train.callbacks.watchdog import Watchdog
from toolkit.train.optim import Scheduler, build_schedule
from toolkit.train.pictures import draw_run
from toolkit.train.start import announce
from toolkit.train.task import AdaptsToRun, Task
from toolkit.train.trainer import Trainer

EVAL_BATCH_SIZE = 1000
"""Samples per forward pass of an evaluation, over all ranks."""


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
    callbacks: Sequence[Callback] = (),
    eval_at_start: bool = False,
    eval_batch_size: int = EVAL_BATCH_SIZE,
    at_end: Callable[[Trainer], object] | None = None,
) -> dict[str, Any]:
    """Train `model` as the run's config says, and finish the run: what a recipe's `main` returns.

    Args:
        run: The run, from `start_run`.
        task: Computes the loss; see `Task` for what it may have besides. The router losses of the config are added,
            unless there is a `RouterPenalty` of the model.
        model: The model as the recipe built it.
        optimizer: Any optimizer of the model's parameters that treats each row of experts by itself.
        data: `train` and `test`, and perhaps `validation`, which early stopping and the best checkpoint go by.
        schedule: A scheduler that was made for `optimizer`, instead of the config's.
        schedule_metric: See `Trainer`.
        augment: Changes training batches of a table: `toolkit.data.visit_draws.BlankPixels`.
        order: Replaces the random permutation of each epoch of a table.
        callbacks: Called before the usual ones.
        eval_at_start: Evaluate the test data before the first step, too.
        eval_batch_size: Samples per forward pass of an evaluation, over all ranks.
        at_end: Called on every rank after training, before the run is finished, such as to export the model.

    Returns:
        The results of the run.

    Raises:
        UserError: For an argument of another type, experts in other EP groups than the config asks for, and training
            data of unknown length without `max_steps`.

    Example:
        >>> import tempfile, toolkit as tk, torch
        >>> config = tk.RunConfig(epochs=2, lr=1e-2, run_dir=tempfile.mkdtemp(), cpu=True)
        >>> inputs = torch.randn(60, 4)
        >>> table = tk.TensorTable(input=inputs, label=inputs.argmax(1))
        >>> with tk.start_run("example", config) as run:
        ...     model = torch.nn.Linear(4, 4)
        ...     optimizer = tk.build_optimizer(model, config)
        ...     results = tk.fit(run, tk.Classification(), model, optimizer, tk.Splits(table, table))
    """
    trainer = standard_trainer(
        run,
        task,
        model,
        optimizer,
        data,
        schedule=schedule,
        schedule_metric=schedule_metric,
        augment=augment,
        order=order,
        callbacks=callbacks,
        eval_at_start=eval_at_start,
        eval_batch_size=eval_batch_size,
    )
    trainer.fit()
    if at_end is not None:
        at_end(trainer)
    return run.finish(trainer.results)


def standard_trainer(
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
    callbacks: Sequence[Callback] = (),
    eval_at_start: bool = False,
    eval_batch_size: int = EVAL_BATCH_SIZE,
) -> Trainer:
    """Return the trainer that the config asks for: it evaluates, saves each epoch, resumes, and can be preempted.

    Arguments and errors are those of `fit`.
    """
    require_type("callbacks", callbacks, Sequence, "Pass a list of callbacks")
    for name, value, kind, remedy in (
        ("run", run, Run, "Pass the result of start_run"),
        ("task", task, Task, "Pass a task, such as tk.Classification()"),
        ("model", model, nn.Module, "Pass the model after the task"),
        ("optimizer", optimizer, torch.optim.Optimizer, "Pass the optimizer after the model"),
        ("data", data, HasSplits, "Pass tk.Splits(train, test)"),
        ("schedule", schedule, Scheduler | Callable | None, "Pass a scheduler of the optimizer"),
        *(("callbacks", each, Callback, "Pass tk.Callback objects") for each in callbacks),
    ):
        require_type(name, value, kind, remedy)
    config, validation = run.config, getattr(data, "validation", None)
    batches = _train_batches(run, data.train, augment, order)
    max_steps = min(filter(None, (config.epochs * batches.steps_per_epoch, config.max_steps)))
    if isinstance(task, AdaptsToRun):
        splits = {"training": data.train, "test": data.test, "validation": validation}
        task = task.for_run({name: table for name, table in splits.items() if isinstance(table, TensorTable)})
    experts = Experts.of(model)
    expert_callbacks = _expert_callbacks(run, experts)
    penalty = None
    if isinstance(config, MoERunConfig):
        balance = next(iter(penalties_of(model.modules())), None)
        if balance is None:
            weight = config.balance_weight_in(max_steps)
            balance = penalty = RouterPenalty(
                list(experts.moe.values()), balance_weight=weight, z_weight=config.z_weight
            )
        expert_callbacks = [WholeStepBalance(balance), *expert_callbacks]
    every = max(1, round(config.eval_every * batches.steps_per_epoch))
    evaluate = partial(Evaluation.of, run, batch_size=eval_batch_size, every=every)
    evaluations = [evaluate(data.test, at_start=eval_at_start)]
    if validation is not None:
        evaluations.append(evaluate(validation, name="validation"))
    usual = f"{evaluations[-1].name}/loss"
    run.draw_at_finish(draw_run)
    announce(run, model, experts, data, batches, max_steps, penalty)
    if config.sync_bn and run.world_size > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.compile:
        model.compile()
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
        penalty=penalty,
        callbacks=[
            Watchdog(limit_s=config.step_timeout, longest_s=60 * config.process_timeout),
            Throughput(),
            *callbacks,
            *expert_callbacks,
            *evaluations,
            Checkpointing(config.checkpoint),
            *([Profile()] if config.profile else []),
            EarlyStopping(config.early_stopping.patience, config.checkpoint.best or usual, config.checkpoint.best_mode),
            Preemption(),
            Progress(),
            SmallerMicroBatches(),
        ],
    )


def _train_batches(
    run: Run, data: Samples, augment: Augment | None, order: Order | None
) -> TrainBatches | LoaderBatches:
    config = run.config
    size, workers = config.batch_size, config.num_workers
    cut: Any = {
        "seed": config.seed,
        "accumulation": run.accumulation,
        "rank": run.rank,
        "world_size": run.world_size,
        "device": run.device,
    }
    if isinstance(data, TensorTable):
        return TrainBatches(data, batch_size=size, num_workers=workers, augment=augment, order=order, **cut)
    if augment is not None or order is not None:
        raise ValueError("`augment` and `order` are for a TensorTable: change or order samples in the DataLoader")
    loader = make_loader(data, batch_size=size, num_workers=workers, shuffle=True)
    known = known_length(loader)
    steps = known or config.max_steps
    if steps is None:
        raise UserError(field="max_steps", remedy="the training data have no length, give the steps of the run")
    return LoaderBatches(loader, steps_per_epoch=steps, endless=known is None, **cut)


def _expert_callbacks(run: Run, experts: Experts) -> list[Callback]:
    """Return what the config asks for of `experts`: balancing by bias, traces, rebalancing, load metrics.

    Raises:
        UserError: The experts are in other EP groups than the config's.
    """
    config, groups = run.config, experts.groups
    if not isinstance(config, ExpertRunConfig):
        return []
    callbacks: list[Callback] = [BiasBalancing()] if isinstance(config, MoERunConfig) else []
    if groups is None:
        return callbacks
    compared = attrgetter("ep_groups", "nodes")
    if run.world_size > 1 and compared(groups) != compared(run.expert_groups):
        remedy = f"the model's experts are on {groups.ep_size} processes: build it with run.expert_groups"
        raise UserError(field="ep_size", value=run.expert_groups.ep_size, remedy=remedy)
    if config.record_traces:
        callbacks.append(TraceRecorder(experts))
    if config.replan.planner:
        callbacks.append(Replan(config.replan))
    return [*callbacks, ExpertLoad()]
