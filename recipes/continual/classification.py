"""Classification where it is known which task each example belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.train.task import Batch, Loss


class ClassificationWithinTasks:
    """Cross-entropy in nats and accuracy among the classes of each example's task: `classes[batch["task"]]`.

    The scenario "task" of `continual.streams`: a head for each task, as one masked output.
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
