"""What a run over a stream of tasks hands to `standard_trainer`: the order of its batches, and its task."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from continual.classification import ClassificationWithinTasks
from continual.streams import TaskOrder, TaskStream
from toolkit.run.run import Run
from toolkit.train.tasks.classification import Classification


def task_order(run: Run, stream: TaskStream) -> TaskOrder:
    """The batches of each task of `stream` for `config.epochs`, one task after another. One epoch of it is the run."""
    config = run.config
    return TaskOrder(sizes=stream.sizes, batch_size=config.batch_size, seed=config.seed, epochs_per_task=config.epochs)


def stream_task(
    stream: TaskStream, *, penalty: Callable[[], Tensor | None] | None = None
) -> Classification | ClassificationWithinTasks:
    """Classification; among the classes of each example's task where `stream` names them."""
    if stream.classes is None:
        return Classification(penalty=penalty)
    return ClassificationWithinTasks(stream.classes, penalty=penalty)
