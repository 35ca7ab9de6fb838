"""The usual trainer of a stream of tasks, as `toolkit.standard.trainer` is that of one set of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from toolkit.batch_size import accumulation_steps
from toolkit.callbacks.base import Callback
from toolkit.callbacks.checkpointing import Checkpointing
from toolkit.callbacks.pictures import Pictures
from toolkit.callbacks.preemption import Preemption
from toolkit.callbacks.progress import Progress
from toolkit.data.batches import EvalBatches, Order, TrainBatches
from toolkit.domains.continual.classification import ClassificationWithinTasks
from toolkit.domains.continual.evaluation import TaskEvaluation
from toolkit.domains.continual.streams import TaskOrder, TaskStream
from toolkit.optim import build_optimizer, build_schedule
from toolkit.run.run import Run
from toolkit.task import Task
from toolkit.tasks.classification import Classification
from toolkit.trainer import Trainer

EVAL_BATCH_SIZE = 1000
"""Samples per forward pass of an evaluation, over all ranks."""


def task_order(run: Run, stream: TaskStream) -> TaskOrder:
    """The tasks of `stream` one after another, `config.epochs` times each."""
    config = run.config
    return TaskOrder(sizes=stream.sizes, batch_size=config.batch_size, seed=config.seed, epochs_per_task=config.epochs)


def stream_task(
    stream: TaskStream, *, penalty: Callable[[], Tensor | None] | None = None
) -> Classification | ClassificationWithinTasks:
    """Classification, within each example's task where `stream` says which classes that has."""
    if stream.classes is None:
        return Classification(penalty=penalty)
    return ClassificationWithinTasks(stream.classes, penalty=penalty)


def stream_trainer(
    run: Run,
    task: Task,
    model: nn.Module,
    stream: TaskStream,
    *,
    order: Order | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """AdamW on each task of `stream` for `config.epochs`; evaluates all tasks after each; resumes.

    `order` may be another one over the rows of `stream.train`, such as a `BatchOrder` for joint training; it is left
    after as many steps. `callbacks` run before the usual ones.
    """
    config, tasks = run.config, task_order(run, stream)
    where = {"rank": run.rank, "world_size": run.world_size, "device": run.device, "num_workers": config.num_workers}
    tests = [EvalBatches(test, batch_size=EVAL_BATCH_SIZE, **where) for test in stream.tests]
    max_steps = tasks.steps_per_epoch
    if config.max_steps is not None:
        max_steps = min(max_steps, config.max_steps)
    make_optimizer = partial(build_optimizer, lr=config.lr, config=config.optimizer)
    accumulation = accumulation_steps(run, task, model, stream.train, make_optimizer)
    return Trainer(
        run,
        task,
        model,
        make_optimizer(model),
        TrainBatches(
            stream.train,
            batch_size=config.batch_size,
            seed=config.seed,
            accumulation=accumulation,
            order=order or tasks,
            **where,
        ),
        max_steps=max_steps,
        schedule=build_schedule(config.schedule, max_steps=max_steps),
        max_grad_norm=config.optimizer.max_grad_norm,
        log_every=config.log_every,
        callbacks=[
            *callbacks,
            Checkpointing(every_steps=config.checkpoint.every_steps, keep=config.checkpoint.keep),
            TaskEvaluation(tests, tasks.task_ends),  # after it, as it asks whether the run is new
            Preemption(),
            Pictures(),
            Progress(),
        ],
    )
