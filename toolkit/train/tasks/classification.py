"""Classification of a batch into `batch["label"]`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.data.table import Batch, TensorTable
from toolkit.errors import UserError
from toolkit.train.task import Loss

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Integer

    from toolkit.experts.layer.losses import RouterPenalty

IGNORED = -100
"""A label that torch's cross-entropy leaves out."""


class Classification:
    """Cross-entropy in nats and accuracy, as means over the labels other than `IGNORED`.

    Args:
        penalty: Router losses to add.
        label_smoothing: Of the training loss.
        inputs: The columns of a batch that the model gets.
    """

    def __init__(
        self,
        *,
        penalty: RouterPenalty | None = None,
        label_smoothing: float = 0.0,
        inputs: Sequence[str] = ("input",),
    ):
        self.penalty, self.label_smoothing, self.inputs = penalty, label_smoothing, inputs
        self._unchecked: dict[str, Integer[Tensor, " _"]] = {}

    def for_run(self, tables: Mapping[str, TensorTable]) -> Self:
        """See `toolkit.train.task.AdaptsToRun`. Every rank checks the labels on the CPU, so a GPU does not wait."""
        adapted = copy.copy(self)
        columns = {name: table.columns.get("label") for name, table in tables.items()}
        adapted._unchecked = {name: labels for name, labels in columns.items() if labels is not None}
        return adapted

    def count(self, batch: Batch) -> int | Int[Tensor, ""]:
        return counted(batch["label"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits = self._logits(model, batch)
        labels = batch["label"]
        entropy = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)
        penalty = self.penalty.share() if self.penalty is not None else None
        return Loss(entropy, counted(labels), penalty, {"accuracy": correct(logits, labels)})

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        logits = self._logits(model, batch)
        labels = batch["label"]
        entropy = F.cross_entropy(logits, labels, reduction="sum")
        return Loss(entropy, counted(labels), sums={"accuracy": correct(logits, labels)})

    def sample_losses(self, model: nn.Module, batch: Batch) -> Float[Tensor, " N"]:
        """(N): nats, each sample's own."""
        return F.cross_entropy(self._logits(model, batch), batch["label"], reduction="none")

    def _logits(self, model: nn.Module, batch: Batch) -> Float[Tensor, "N C"]:
        logits: Tensor = model(*(batch[name] for name in self.inputs))
        classes = logits.shape[-1]
        for name, labels in self._unchecked.items():
            wrong = (labels >= classes) | ((labels < 0) & (labels != IGNORED))
            if wrong.any():
                row = int(wrong.nonzero()[0])
                raise UserError(
                    f"label: row {row} of the {name} data has {int(labels[row])}. The model has {classes} classes, 0 "
                    f"to {classes - 1}."
                )
        self._unchecked = {}
        return logits


def counted(labels: Integer[Tensor, " N"]) -> int | Int[Tensor, ""]:
    """How many labels are not `IGNORED`: a tensor where they are on a GPU, so that the host does not wait for it."""
    number = (labels.long() != IGNORED).sum()  # as bytes, 156 would be equal to -100
    return int(number) if labels.device.type == "cpu" else number


def correct(logits: Float[Tensor, "N C"], labels: Integer[Tensor, " N"]) -> Int[Tensor, ""]:
    """How many rows of `logits` have their maximum at the label."""
    return (logits.argmax(-1) == labels).sum()
