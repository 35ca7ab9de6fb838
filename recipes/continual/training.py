"""What a run over a stream of tasks hands to `standard_trainer`: the order of its batches, and its task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from continual.streams import TaskOrder, TaskStream
from toolkit.data.table import Batch
from toolkit.run.run import Run
from toolkit.train.task import Loss
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


class ClassificationWithinTasks:
    """Cross-entropy in nats and accuracy among the classes of each example's task: `classes[batch["task"]]`.

    The scenario "task" of `streams.py`: a head for each task, as one masked output.
    `penalty` is as in `toolkit.train.tasks.classification.Classification`.
    """

    def __init__(self, classes: Sequence[Sequence[int]], *, penalty: Callable[[], Tensor | None] | None = None):
        self.penalty = penalty
        self.foreign = torch.ones(len(classes), 1 + max(map(max, classes)), dtype=torch.bool)
        """(tasks, classes): whether a class is none of the task's."""
        for task, own in enumerate(classes):
            self.foreign[task, list(own)] = False

    def count(self, batch: Batch) -> int:
        return len(batch["label"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        loss = self.evaluate(model, batch)
        return Loss(loss.sum, loss.count, self.penalty() if self.penalty is not None else None, loss.sums)

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        logits = self._logits(model, batch)
        labels = batch["label"]
        correct = (logits.argmax(-1) == labels).sum()
        return Loss(F.cross_entropy(logits, labels, reduction="sum"), len(labels), sums={"accuracy": correct})

    def sample_losses(self, model: nn.Module, batch: Batch) -> Float[Tensor, " N"]:
        """(N): nats, each sample's own."""
        return F.cross_entropy(self._logits(model, batch), batch["label"], reduction="none")

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        self.foreign = self.foreign.to(batch["task"].device)
        return model(batch["input"]).masked_fill(self.foreign[batch["task"]], -torch.inf)
