"""A `Trainer` made from a config, with the usual callbacks. For other choices construct `Trainer` yourself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeGuard

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
from toolkit.data.table import TensorTable
from toolkit.errors import UserError
from toolkit.run.run import Run
from toolkit.train.batch_size import accumulation_steps, kept_accumulation_steps
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.early_stopping import EarlyStopping
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.callbacks.out_of_memory import SmallerMicroBatches
from toolkit.train.callbacks.pictures import Pictures
from toolkit.train.callbacks.preemption import Preemption
from toolkit.train.callbacks.progress import Progress
from toolkit.train.callbacks.throughput import BarrierWait, Throughput
from toolkit.train.callbacks.watchdog import Watchdog
from toolkit.train.device_use import DeviceUse
from toolkit.train.expert_setup import missing_expert_callbacks
from toolkit.train.optim import build_optimizer, build_schedule
from toolkit.train.profile import Profile
from toolkit.train.start import describe_start, print_idle_settings
from toolkit.train.task import Task
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer

EVAL_BATCH_SIZE = 1000
"""Samples per forward pass of an evaluation, over all ranks."""


def standard_trainer(
    run: Run,
    task: Task,
    model: nn.Module,
    *,
    train: TensorTable | Dataset[Any] | Iterable[Any],
    test: TensorTable | Dataset[Any] | Iterable[Any] | None = None,
    steps_per_epoch: int | None = None,
    augment: Augment | None = None,
    order: Order | None = None,
    max_steps: int | None = None,
    evaluation: Callback | None = None,
    more_evaluations: Sequence[Evaluation] = (),
    eval_at_start: bool = False,
    callbacks: Sequence[Callback] = (),
    eval_batch_size: int = EVAL_BATCH_SIZE,
) -> Trainer:
    """AdamW on the config's schedule; evaluates on `test` and saves each epoch, resumes, and can be preempted.

    `train` and `test` are tables, data sets of torch's kinds, or DataLoaders that give global batches: dicts of tensors
    with one row per sample. `steps_per_epoch` is for the latter two, by default the number of their batches; where that
    is not known, the run ends at `--max-steps` and counts as one epoch.

    `augment` changes training batches, and what is replayed from a memory, see `toolkit.data.visit_draws.BlankPixels`.
    `order` replaces the random permutation of each epoch, and `max_steps` the config's number of epochs. `evaluation`
    is a callback in place of `test`, such as one over a stream of tasks; `more_evaluations` are of
    further data sets. `eval_at_start` evaluates `test` before the first step, too. `callbacks` run before the usual
    ones, so that what they record is on the line of metrics that is printed. Load metrics of experts, and what
    `--replan.planner` and `--record-traces` ask for, are added where missing.

    Raises ValueError unless either `test` or `evaluation` is given, and UserError for early stopping without `test` and
    for settings of experts that the model was not built with, and for data without samples.
    """
    config = run.config
    if (test is None) == (evaluation is None):
        raise ValueError("give either `test`, a table, or `evaluation`, a callback")
    if test is None and config.early_stopping.patience is not None:
        raise UserError(
            f"--early-stopping.patience {config.early_stopping.patience}: this run has no single test set, leave "
            "it out."
        )
    for which, data in (("training", train), ("test", test)):
        if data is None:
            continue
        refuse_columns(which, data)
        if known_length(data) == 0:
            why = " or leave out its drop_last" if isinstance(data, DataLoader) else ""
            raise UserError(f"the {which} data give no batches: pass a data set with samples{why}.")
    if isinstance(task, Classification):
        tables = {
            name: table for name, table in (("training", train), ("test", test)) if isinstance(table, TensorTable)
        }
        for name, table in tables.items() if _reads_known_columns(task) else ():
            as_in_batches = AugmentedTable(table, augment) if augment and name == "training" else table
            task.check_columns(as_in_batches[torch.arange(1)])
        task.expect({name: table.columns["label"] for name, table in tables.items() if "label" in table.columns})
        task.may_ignore |= augment is not None  # which may change labels
    missing = missing_expert_callbacks(run, model, task, callbacks)
    batches: TrainBatches | LoaderBatches
    if isinstance(train, TensorTable):
        batches = _table_batches(run, task, model, train, augment, order)
        samples = f"{len(train):,} training samples"
    else:
        if augment is not None or order is not None:
            raise ValueError("`augment` and `order` are for a TensorTable: change or order samples in the DataLoader")
        batches = _loader_batches(run, train, steps_per_epoch, max_steps, _look(task, "training"))
        samples = "batches of unknown number" if batches.endless else f"{batches.steps_per_epoch:,} batches an epoch"
    if test is not None:
        every_steps = config.eval_every * batches.steps_per_epoch
        evaluation = Evaluation(
            eval_batches(run, test, eval_batch_size, _look(task, "test")), every_steps, at_start=eval_at_start
        )
    assert evaluation is not None
    max_steps = max_steps or config.epochs * batches.steps_per_epoch
    if config.max_steps is not None:
        max_steps = min(max_steps, config.max_steps)
    optimizer = build_optimizer(model, lr=config.peak_lr, config=config.optimizer)
    print_idle_settings(run, max_steps=max_steps, steps_per_epoch=batches.steps_per_epoch)
    _announce(run, model, samples, max_steps, epochs=max_steps / batches.steps_per_epoch)
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
        schedule=build_schedule(config.schedule, max_steps=max_steps, steps_per_epoch=batches.steps_per_epoch),
        max_grad_norm=config.optimizer.max_grad_norm,
        log_every=config.log_every,
        callbacks=[
            BarrierWait(),
            Watchdog(limit_s=config.step_timeout, longest_s=60 * config.process_timeout),
            *callbacks,
            *missing,
            throughput,
            DeviceUse(throughput, peak_flops=config.peak_flops),
            *([Profile()] if config.profile else []),
            evaluation,
            *more_evaluations,
            Checkpointing(config.checkpoint),
            EarlyStopping(config.early_stopping),
            Preemption(),
            Pictures(),
            Progress(),
            SmallerMicroBatches(),
        ],
    )


def _table_batches(
    run: Run, task: Task, model: nn.Module, table: TensorTable, augment: Augment | None, order: Order | None
) -> TrainBatches:
    config = run.config
    make_optimizer = partial(build_optimizer, lr=config.lr, config=config.optimizer)
    source = table if augment is None else AugmentedTable(table, augment)
    return TrainBatches(
        table,
        batch_size=config.batch_size,
        seed=config.seed,
        accumulation=accumulation_steps(run, task, model, source, make_optimizer),
        augment=augment,
        order=order,
        rank=run.rank,
        world_size=run.world_size,
        device=run.device,
        num_workers=config.num_workers,
    )


def _look(task: Task, name: str) -> Look | None:
    """What is called with each global batch of a DataLoader of the `name` data."""
    return partial(task.expect_batch, name) if _reads_known_columns(task) else None


def _reads_known_columns(task: Task) -> TypeGuard[Classification]:
    """Whether `task` reads its `inputs` and `label`: a subclass may read others."""
    return type(task) is Classification


def _loader_batches(
    run: Run, data: Any, steps_per_epoch: int | None, max_steps: int | None, look: Look | None
) -> LoaderBatches:
    config = run.config
    if config.auto_batch_size:
        raise UserError(
            "--auto-batch-size True: a DataLoader cannot be measured: use --gradient-accumulation-steps instead."
        )
    if config.num_workers and isinstance(data, DataLoader):
        run.print(f"--num-workers {config.num_workers}: no effect, because the DataLoader has its own.")
    loader = make_loader(data, batch_size=config.batch_size, num_workers=config.num_workers, shuffle=True)
    known = steps_per_epoch or known_length(loader)
    whole = known or max_steps or config.max_steps
    if whole is None:
        raise UserError(
            "--max-steps None: nobody knows how many batches the training data have: give it, or steps_per_epoch."
        )
    return LoaderBatches(
        loader,
        steps_per_epoch=whole,
        endless=known is None,
        seed=config.seed,
        accumulation=kept_accumulation_steps(run),
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


def eval_batches(run: Run, test: Any, batch_size: int, look: Look | None = None) -> AnyEvalBatches:
    """Of a table, a data set or a DataLoader, `batch_size` samples over all ranks; `look` is called with each global
    batch of the latter two. Raises UserError for a generator."""
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
