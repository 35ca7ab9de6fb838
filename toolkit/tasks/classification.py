"""Classification of a batch into `batch["label"]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.task import Batch, Loss

IGNORED = -100
"""A label that torch's cross-entropy leaves out."""


class Classification:
    """Cross-entropy in nats and accuracy, as means over the labels other than `IGNORED`.

    The model gets the columns `inputs` of the batch. `penalty` is called after each training forward and returns a term
    to add, such as `toolkit.moe.losses.RouterPenalty`; `label_smoothing` applies to training only.
    """

    def __init__(
        self,
        *,
        penalty: Callable[[], Tensor | None] | None = None,
        label_smoothing: float = 0.0,
        inputs: Sequence[str] = ("input",),
    ):
        self.penalty, self.label_smoothing, self.inputs = penalty, label_smoothing, inputs
        self.may_ignore = True
        """Whether a training label may be `IGNORED`: then each micro-batch's labels are counted where they are."""
        self._unchecked: dict[str, Integer[Tensor, " _"]] = {}

    def expect(self, **labels: Integer[Tensor, " _"]) -> None:
        """Have the first forward, which tells the number of classes, raise UserError where `labels`, those of a whole
        data set by its name, have one that is no class, or only such that are left out. Every rank raises it, and a GPU
        does not wait for it. The labels of "training" tell `may_ignore`, too."""
        self._unchecked |= labels
        if "training" in labels:
            self.may_ignore = bool((labels["training"] == IGNORED).any())

    def count(self, batch: Batch) -> int | Int[Tensor, ""]:
        return counted(batch["label"]) if self.may_ignore else len(batch["label"])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits = self._logits(model, batch)
        labels = batch["label"]
        entropy = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)
        penalty = self.penalty() if self.penalty is not None else None
        return Loss(entropy, self.count(batch), penalty, {"accuracy": correct(logits, labels)})

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
        self._check(logits.shape[-1])
        return logits

    def _check(self, classes: int) -> None:
        for name, labels in self._unchecked.items():
            if len(labels) and (labels == IGNORED).all():
                raise UserError(
                    f"the {name} data have only labels of {IGNORED}, which the loss leaves out: give some a class."
                )
            wrong = (labels >= classes) | ((labels < 0) & (labels != IGNORED))
            if wrong.any():
                row = int(wrong.nonzero()[0])
                raise UserError(
                    f"the {name} data have the label {int(labels[row])} in row {row} of the column `label`: "
                    f"the model has {classes} classes, 0 to {classes - 1}."
                )
        self._unchecked = {}


def counted(labels: Integer[Tensor, " N"]) -> int | Int[Tensor, ""]:
    """How many labels are not `IGNORED`: a tensor where they are on a GPU, so that the host does not wait for it."""
    number = (labels.long() != IGNORED).sum()  # as bytes, 156 would be equal to -100
    return int(number) if labels.device.type == "cpu" else number


def correct(logits: Float[Tensor, "N C"], labels: Integer[Tensor, " N"]) -> Int[Tensor, ""]:
    """How many rows of `logits` have their maximum at the label."""
    return (logits.argmax(-1) == labels).sum()
